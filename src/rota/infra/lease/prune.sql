-- Forget at most $2 leases that nobody has held for $1 seconds; fences go on rising all the same.
DELETE FROM rota.lease
WHERE name IN (
  SELECT name FROM rota.lease
  WHERE expires_at < clock_timestamp() - make_interval(secs => $1::float8)
    AND coalesce(acquired_at, '-infinity') < clock_timestamp() - make_interval(secs => $1::float8)
  LIMIT $2
  FOR UPDATE SKIP LOCKED
)
