-- The word by which job $1 was denied; no row when it was not.
SELECT word FROM rota.job_done WHERE pk_job = $1::uuid AND state = 'DENIED' LIMIT 1
