-- name: jobs_find
-- Up to 6 jobs with an id between $1 and $2, live and done.
SELECT pk_job AS id FROM (
  (SELECT pk_job FROM rota.job WHERE pk_job BETWEEN $1::uuid AND $2::uuid ORDER BY pk_job LIMIT 6)
  UNION (SELECT pk_job FROM rota.job_done WHERE pk_job BETWEEN $1 AND $2 ORDER BY pk_job LIMIT 6)
) AS found ORDER BY 1 LIMIT 6

-- name: jobs_named
-- The newest job with the name $1, live or done.
SELECT pk_job AS id FROM (
  (SELECT pk_job FROM rota.job WHERE str_name = $1::text ORDER BY pk_job DESC LIMIT 1)
  UNION ALL (SELECT pk_job FROM rota.job_done WHERE str_name = $1 ORDER BY pk_job DESC LIMIT 1)
) AS found ORDER BY 1 DESC LIMIT 1

-- name: jobs_named_live
-- Up to 6 live jobs with the name $1.
SELECT pk_job AS id FROM rota.job WHERE str_name = $1::text ORDER BY pk_job DESC LIMIT 6

-- name: layers_find
-- Up to 6 layers of live jobs with an id between $1 and $2.
SELECT pk_layer AS id FROM rota.layer WHERE pk_layer BETWEEN $1::uuid AND $2::uuid ORDER BY pk_layer LIMIT 6

-- name: runs_find
-- Up to 6 workflow runs with an id between $1 and $2.
SELECT pk_run AS id FROM rota.workflow_run WHERE pk_run BETWEEN $1::uuid AND $2::uuid ORDER BY 1 LIMIT 6
