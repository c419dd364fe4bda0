-- PENDING jobs that nobody has touched for $1 seconds and that say nothing, or one of $2; the oldest first, at most $3.
SELECT pk_job FROM rota.job
WHERE state = 'PENDING' AND ends_as IS NULL AND ts_updated < clock_timestamp() - make_interval(secs => $1::float8)
  AND (reason IS NULL OR reason = ANY ($2::text[]))
ORDER BY ts_updated LIMIT $3::integer
