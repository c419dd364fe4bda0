-- name: traces_of_jobs
-- What is kept of the submissions of these jobs, which have ended.
SELECT pk_job AS id, request FROM rota.job_done WHERE pk_job = ANY ($1::uuid[]) AND request IS NOT NULL

-- name: traces_of_layers
-- What is kept of the submissions of these live layers.
SELECT l.pk_layer AS id, j.request FROM rota.layer l JOIN rota.job j ON j.pk_job = l.pk_job
WHERE l.pk_layer = ANY ($1::uuid[]) AND j.request IS NOT NULL
