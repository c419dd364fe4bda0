-- name: principal_active
-- Whether principal $1 is not disabled; then it stays so until the transaction ends.
SELECT rota.principal_active($1::text)

-- name: traces_of_jobs
-- Stored submission details of these finished jobs.
SELECT pk_job AS id, request FROM rota.job_done WHERE pk_job = ANY ($1::uuid[]) AND request IS NOT NULL

-- name: traces_of_layers
-- Stored submission details of these live layers.
SELECT l.pk_layer AS id, j.request FROM rota.layer l JOIN rota.job j ON j.pk_job = l.pk_job
WHERE l.pk_layer = ANY ($1::uuid[]) AND j.request IS NOT NULL
