-- name: acquire
-- Grant every free lease among $1 to $2 for $3 seconds; $4 requests a notification when a held one is released.
SELECT name, fence, left_s FROM rota.lease_acquire($1::text[], $2::text, make_interval(secs => $3::float8), $4::boolean)

-- name: guard
-- Fail unless every grant is valid; a holder paused in this transaction blocks others for at most $3 ms.
SELECT rota.assert_fence(mine.name, mine.fence), set_config('idle_in_transaction_session_timeout', $3, true)
FROM (SELECT * FROM unnest($1::text[], $2::bigint[]) AS given (name, fence) ORDER BY name) AS mine

-- name: prune
-- Delete at most $2 leases without a holder for $1 seconds; fences keep increasing.
DELETE FROM rota.lease
WHERE name IN (
  SELECT name FROM rota.lease
  WHERE expires_at < clock_timestamp() - make_interval(secs => $1::float8)
    AND coalesce(acquired_at, '-infinity') < clock_timestamp() - make_interval(secs => $1::float8)
  LIMIT $2
  FOR UPDATE SKIP LOCKED
)

-- name: release
-- Release the leases whose grant is still the latest, and notify their waiters.
WITH given_back AS (
  UPDATE rota.lease l
  SET expires_at = '-infinity', holder = NULL
  FROM unnest($1::text[], $2::bigint[]) AS mine (name, fence)
  WHERE l.name = mine.name AND l.fence = mine.fence AND l.holder IS NOT NULL
  RETURNING l.name, l.wanted
)
SELECT name, CASE WHEN wanted THEN pg_notify('rota_lease', name) END FROM given_back

-- name: renew
-- Renew the leases whose grant is still the latest and has not expired; returned names are held.
UPDATE rota.lease l
SET expires_at = clock_timestamp() + make_interval(secs => mine.ttl_s)
FROM unnest($1::text[], $2::bigint[], $3::float8[]) AS mine (name, fence, ttl_s)
WHERE l.name = mine.name AND l.fence = mine.fence AND l.expires_at > clock_timestamp()
RETURNING l.name
