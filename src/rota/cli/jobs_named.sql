-- The newest job called $1, live or done.
SELECT pk_job AS id FROM (
  (SELECT pk_job FROM rota.job WHERE str_name = $1::text ORDER BY pk_job DESC LIMIT 1)
  UNION ALL (SELECT pk_job FROM rota.job_done WHERE str_name = $1 ORDER BY pk_job DESC LIMIT 1)
) AS found ORDER BY 1 DESC LIMIT 1
