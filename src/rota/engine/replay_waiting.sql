-- PENDING jobs that have waited for $1 seconds for a reason of the gate's own, so none of $2; the oldest first, at most $3.
SELECT pk_job FROM rota.job
WHERE state = 'PENDING' AND ends_as IS NULL AND ts_updated < clock_timestamp() - make_interval(secs => $1::float8)
  AND reason <> ALL ($2::text[])
ORDER BY ts_updated LIMIT $3::integer
