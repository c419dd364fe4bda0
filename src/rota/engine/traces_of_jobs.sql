-- What is kept of the submissions of these jobs, which have ended.
SELECT pk_job AS id, request FROM rota.job_done WHERE pk_job = ANY ($1::uuid[]) AND request IS NOT NULL
