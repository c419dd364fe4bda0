-- Give back the leases whose grant is still the last one, and wake whoever waits for them.
WITH given_back AS (
  UPDATE rota.lease l
  SET expires_at = '-infinity', holder = NULL
  FROM unnest($1::text[], $2::bigint[]) AS mine (name, fence)
  WHERE l.name = mine.name AND l.fence = mine.fence AND l.holder IS NOT NULL
  RETURNING l.name, l.wanted
)
SELECT name, CASE WHEN wanted THEN pg_notify('rota_lease', name) END FROM given_back
