-- Jobs whose ids lie between $1 and $2, live and done, a few of them.
SELECT pk_job AS id FROM (
  (SELECT pk_job FROM rota.job WHERE pk_job BETWEEN $1::uuid AND $2::uuid ORDER BY pk_job LIMIT 6)
  UNION (SELECT pk_job FROM rota.job_done WHERE pk_job BETWEEN $1 AND $2 ORDER BY pk_job LIMIT 6)
) AS found ORDER BY 1 LIMIT 6
