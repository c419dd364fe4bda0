-- What jobs $1 went through, live or done; one that ends meanwhile is found once.
SELECT pk_job, history FROM rota.job WHERE pk_job = ANY ($1::uuid[])
UNION ALL
SELECT pk_job, history FROM rota.job_done WHERE pk_job = ANY ($1::uuid[])
