-- Prolong the leases whose grant is still the last one and has not run out; the names that come back are held.
UPDATE rota.lease l
SET expires_at = clock_timestamp() + make_interval(secs => mine.ttl_s)
FROM unnest($1::text[], $2::bigint[], $3::float8[]) AS mine (name, fence, ttl_s)
WHERE l.name = mine.name AND l.fence = mine.fence AND l.expires_at > clock_timestamp()
RETURNING l.name
