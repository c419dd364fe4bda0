-- Jobs behind $2 that have waited for an approval for $1 seconds, by id; at most $3.
SELECT pk_job FROM rota.job
WHERE state = 'APPROVAL_REQUIRED' AND ends_as IS NULL AND ts_updated < clock_timestamp() - make_interval(secs => $1::float8)
  AND pk_job > $2::uuid
ORDER BY pk_job LIMIT $3::integer
