-- Jobs that job $1 waits for, those submitted first first, at most $2, and how many there are; names of its own show alone.
SELECT b.pk_job AS id, CASE WHEN b.pk_show = j.pk_show THEN b.str_name ELSE b.pk_job::text END AS name, b.state, b.reason,
       a.if_failed, count(*) OVER () AS jobs
FROM rota.job_after a JOIN rota.job b ON b.pk_job = a.pk_before JOIN rota.job j ON j.pk_job = a.pk_job
WHERE a.pk_job = $1::uuid ORDER BY b.ts_submitted, b.pk_job LIMIT $2::integer
