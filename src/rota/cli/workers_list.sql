-- Workers that are up, or all that are kept ($1), with what is booked on each.
SELECT w.pk_host AS id, w.str_name AS name, w.pool, w.state, w.hello, w.ts_up AS up_at, w.ts_ended AS ended_at,
       coalesce(p.frames, 0)::bigint AS frames, coalesce(p.cores, 0)::bigint AS cores,
       coalesce(p.gpus, 0)::bigint AS gpus, coalesce(p.jobs, 0)::bigint AS jobs
FROM rota.worker w
LEFT JOIN (SELECT pk_host, count(*) AS frames, sum(int_cores_reserved) AS cores, sum(int_gpus_reserved) AS gpus,
                  count(DISTINCT pk_job) AS jobs
           FROM rota.proc GROUP BY pk_host) AS p USING (pk_host)
WHERE $1::boolean OR w.state = 'up'
ORDER BY w.state = 'up' DESC, w.pool, w.str_name, w.ts_up LIMIT 10000
