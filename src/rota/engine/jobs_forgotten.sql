-- Let go on what waits for jobs that have ended, $1 of these at most: they ended while somebody submitted what waits.
SELECT rota.jobs_release(ARRAY(
  SELECT DISTINCT a.pk_before FROM rota.job_after a
  JOIN rota.job w ON w.pk_job = a.pk_job AND w.ends_as IS NULL
  WHERE NOT EXISTS (SELECT FROM rota.job j WHERE j.pk_job = a.pk_before)
    AND NOT EXISTS (SELECT FROM rota.scan s WHERE s.pk_job = a.pk_before AND s.mode <> 'pass') LIMIT $1::integer)) AS waiting
