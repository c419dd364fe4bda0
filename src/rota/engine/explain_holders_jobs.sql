-- Jobs of show $1 that count against the number that it may run at once, at most $2, the first first.
SELECT s.pk_job AS id, j.str_name AS name, 0 AS frames, 0 AS cores, 0 AS gpus
FROM rota.job_slot s JOIN rota.job j USING (pk_job) WHERE s.pk_show = $1::uuid ORDER BY s.ts_taken, s.pk_job LIMIT $2::integer
