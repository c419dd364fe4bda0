-- Live jobs worth a look, at most $1 of each kind: those with most frames on workers, then the newest.
-- And how many are live, counted up to $2.
WITH busy AS MATERIALIZED (
  SELECT pk_job, count(*) AS running FROM rota.proc GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT $1::integer
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
