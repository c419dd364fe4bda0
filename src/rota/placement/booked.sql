-- On which worker the tokens from $1 to $2, pairwise, are booked, and what each needs.
SELECT p.pk_host AS worker, p.token, p.int_cores_reserved AS cores, p.int_gpus_reserved AS gpus,
       coalesce(c.memory_mb, 0) AS memory_mb
FROM unnest($1::bigint[], $2::bigint[]) AS run (first, last)
JOIN rota.proc p ON p.token BETWEEN run.first AND run.last
LEFT JOIN rota.layer l USING (pk_layer)
LEFT JOIN rota.queue_class q ON q.queue = l.queue
LEFT JOIN rota.placement_class c USING (class_id)
ORDER BY p.token
