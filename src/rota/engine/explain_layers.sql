-- Of layers $2 of job $1: frames that wait for their time, and whether their queue is paused.
SELECT l.pk_layer, q.paused, coalesce(d.n, 0)::bigint AS deferred, d.run_at
FROM rota.layer l
JOIN rota.queues q ON q.queue = l.queue
LEFT JOIN (SELECT layer_id, sum(n) AS n, min(run_at) AS run_at FROM rota.deferred_jobs WHERE job_id = $1::uuid GROUP BY 1) AS d
  ON d.layer_id = l.pk_layer
WHERE l.pk_layer = ANY ($2::uuid[])
