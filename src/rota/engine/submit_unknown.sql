-- Those of the jobs $1 that are not kept, live or done.
SELECT given.id FROM unnest($1::uuid[]) AS given (id)
WHERE NOT EXISTS (SELECT FROM rota.job j WHERE j.pk_job = given.id)
  AND NOT EXISTS (SELECT FROM rota.job_done d WHERE d.pk_job = given.id)
