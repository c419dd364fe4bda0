-- name: top_jobs
-- At most $1 live jobs: those with the most frames on workers, then the newest. Also the number of live jobs, counted
-- up to $2.
WITH busy AS MATERIALIZED (
  SELECT pk_job, count(*) AS running FROM rota.proc WHERE NOT b_ended GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT $1::integer
), newest AS MATERIALIZED (
  SELECT pk_job, 0::bigint AS running FROM rota.job ORDER BY pk_job DESC LIMIT $1
)
SELECT j.pk_job AS id, j.str_name AS name, coalesce(s.str_name, j.pk_show::text) AS show, j.state, j.reason, j.priority,
       j.ts_submitted AS submitted_at, c.running, l.frames, l.succeeded, l.ended,
       (SELECT count(*) FROM (SELECT FROM rota.job LIMIT $2::integer) AS counted) AS live
FROM (SELECT pk_job, max(running) AS running FROM (SELECT * FROM busy UNION ALL SELECT * FROM newest) AS worth GROUP BY 1) AS c
JOIN rota.job j USING (pk_job)
LEFT JOIN rota.show s USING (pk_show)
CROSS JOIN LATERAL (
  SELECT sum(frames)::bigint AS frames, sum(succeeded)::bigint AS succeeded,
         sum(succeeded + quarantined + failed + timed_out + cancelled + denied)::bigint AS ended
  FROM rota.layer WHERE pk_job = j.pk_job
) AS l
ORDER BY c.running DESC, j.pk_job DESC LIMIT $1

-- name: top_shares
-- Subscriptions with their usage, and the waiting frames of the whole show; pool is null for a show without any.
WITH used AS MATERIALIZED (
  SELECT pk_show, pk_alloc, count(*) FILTER (WHERE NOT b_ended) AS frames, sum(int_cores_reserved)::bigint AS cores,
         sum(int_gpus_reserved)::bigint AS gpus
  FROM rota.proc GROUP BY 1, 2
), waiting AS MATERIALIZED (
  SELECT q.pk_show, sum(c.waiting + c.deferred)::bigint AS frames, sum(c.completed + c.failed + c.cancelled)::bigint AS ended,
         sum(c.failed)::bigint AS failed
  FROM rota.queue_counts_exact(NULL) AS c JOIN rota.queue_class q USING (queue) GROUP BY 1
)
SELECT s.str_name AS show, a.str_name AS pool, coalesce(b.int_size, 0) AS size, coalesce(b.int_burst, 0) AS burst,
       coalesce(u.cores, 0) AS cores, coalesce(u.gpus, 0) AS gpus, coalesce(u.frames, 0) AS frames,
       coalesce(w.frames, 0) AS waiting, coalesce(w.ended, 0) AS ended, coalesce(w.failed, 0) AS failed
FROM rota.show s
LEFT JOIN rota.subscription b USING (pk_show)
LEFT JOIN rota.alloc a USING (pk_alloc)
LEFT JOIN used u ON u.pk_show = s.pk_show AND u.pk_alloc = b.pk_alloc
LEFT JOIN waiting w ON w.pk_show = s.pk_show
ORDER BY coalesce(u.cores, 0) DESC, coalesce(w.frames, 0) DESC, s.str_name, a.str_name
LIMIT 1000
