-- Make the row of job $2 of show $1, without caps, if it lives or frames of it run, and it has none.
INSERT INTO rota.job_resource (pk_job, pk_show)
SELECT $2::uuid, $1::uuid
WHERE EXISTS (SELECT FROM rota.job WHERE pk_show = $1::uuid AND pk_job = $2::uuid)
   OR EXISTS (SELECT FROM rota.proc WHERE pk_show = $1::uuid AND pk_job = $2::uuid)
ON CONFLICT DO NOTHING
