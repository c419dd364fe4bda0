-- Workers that are up, or all that are kept ($1), with what is booked on each.
SELECT w.pk_host AS id, w.str_name AS name, w.pool, w.state, w.hello, w.ts_up AS up_at, w.ts_ended AS ended_at,
       coalesce(p.frames, 0)::bigint AS frames, coalesce(p.cores, 0)::bigint AS cores,
       coalesce(p.gpus, 0)::bigint AS gpus, coalesce(p.memory_mb, 0)::bigint AS memory_mb,
       coalesce(p.jobs, 0)::bigint AS jobs
FROM rota.worker w
LEFT JOIN (
  SELECT b.pk_host, sum(b.frames) AS frames, sum(b.cores) AS cores, sum(b.gpus) AS gpus, count(DISTINCT b.pk_job) AS jobs,
         sum(b.frames * coalesce(c.memory_mb, 0)) AS memory_mb
  FROM (SELECT pk_host, pk_job, pk_layer, count(*) AS frames, sum(int_cores_reserved) AS cores,
               sum(int_gpus_reserved) AS gpus
        FROM rota.proc GROUP BY 1, 2, 3) AS b
  LEFT JOIN rota.layer l USING (pk_layer)
  LEFT JOIN rota.queue_class q ON q.queue = l.queue
  LEFT JOIN rota.placement_class c USING (class_id)
  GROUP BY b.pk_host
) AS p USING (pk_host)
WHERE $1::boolean OR w.state = 'up'
ORDER BY w.state = 'up' DESC, w.pool, w.str_name, w.ts_up LIMIT 10000
