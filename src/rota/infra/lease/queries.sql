-- name: acquire
-- Take every free lease among $1 for $2, for $3 seconds; $4 asks to be notified when a taken one is released.
SELECT name, fence, left_s FROM rota.lease_acquire($1::text[], $2::text, make_interval(secs => $3::float8), $4::boolean)

-- name: guard
-- Fail unless every grant still runs, and let a holder that is paused in this transaction block others for $3 ms at most.
SELECT rota.assert_fence(mine.name, mine.fence), set_config('idle_in_transaction_session_timeout', $3, true)
FROM (SELECT * FROM unnest($1::text[], $2::bigint[]) AS given (name, fence) ORDER BY name) AS mine

-- name: prune
-- Forget at most $2 leases that nobody has held for $1 seconds; fences go on rising all the same.
DELETE FROM rota.lease
WHERE name IN (
  SELECT name FROM rota.lease
  WHERE expires_at < clock_timestamp() - make_interval(secs => $1::float8)
    AND coalesce(acquired_at, '-infinity') < clock_timestamp() - make_interval(secs => $1::float8)
  LIMIT $2
  FOR UPDATE SKIP LOCKED
)

-- name: release
-- Give back the leases whose grant is still the last one, and wake whoever waits for them.
WITH given_back AS (
  UPDATE rota.lease l
  SET expires_at = '-infinity', holder = NULL
  FROM unnest($1::text[], $2::bigint[]) AS mine (name, fence)
  WHERE l.name = mine.name AND l.fence = mine.fence AND l.holder IS NOT NULL
  RETURNING l.name, l.wanted
)
SELECT name, CASE WHEN wanted THEN pg_notify('rota_lease', name) END FROM given_back

-- name: renew
-- Prolong the leases whose grant is still the last one and has not run out; the names that come back are held.
UPDATE rota.lease l
SET expires_at = clock_timestamp() + make_interval(secs => mine.ttl_s)
FROM unnest($1::text[], $2::bigint[], $3::float8[]) AS mine (name, fence, ttl_s)
WHERE l.name = mine.name AND l.fence = mine.fence AND l.expires_at > clock_timestamp()
RETURNING l.name
