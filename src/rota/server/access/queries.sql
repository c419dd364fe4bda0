-- name: keys_look
-- The keys $1 with digest, grants, state and remaining lifetime.
SELECT k.id, k.digest, k.name, rota.api_grants(k.id) AS grants, rota.api_key_state(k) AS state,
       extract(epoch FROM k.ts_expires - clock_timestamp())::float8 AS expires_in_s
FROM rota.api_key k WHERE k.id = ANY ($1::text[])

-- name: key_add
-- Add key $1 with digest $2, name $3 and a lifetime of $4 seconds (NULL: unlimited); no row when the id is taken.
INSERT INTO rota.api_key (id, digest, name, ts_expires)
VALUES ($1, $2, $3, now() + make_interval(secs => $4::float8))
ON CONFLICT (id) DO NOTHING RETURNING id

-- name: key_grant
-- Grant key $1 the roles $2 in the shows $3; a NULL show means every show.
INSERT INTO rota.api_grant (key_id, role, pk_show, b_every)
SELECT $1::text, role, show, show IS NULL FROM unnest($2::text[], $3::uuid[]) AS given (role, show)

-- name: key_list
-- Keys, newest first. $1: include revoked keys; $2: only these ids (NULL: all).
SELECT k.id, k.name, rota.api_grants(k.id) AS grants, rota.api_key_state(k) AS state,
       k.ts_created, k.ts_expires, k.ts_last_used, k.ts_revoked
FROM rota.api_key k
WHERE ($1::boolean OR k.ts_revoked IS NULL) AND ($2::text[] IS NULL OR k.id = ANY ($2))
ORDER BY k.ts_created DESC, k.id

-- name: key_revoke
-- Revoke key $1; no row when it was already revoked.
UPDATE rota.api_key SET ts_revoked = now() WHERE id = $1 AND ts_revoked IS NULL RETURNING id

-- name: key_shows
-- All shows by name, to resolve grants.
SELECT str_name AS name, pk_show AS id FROM rota.show ORDER BY str_name

-- name: keys_used
-- Record that the keys $1 were used $2 seconds ago, at most once a minute each. Skips rows that another replica is writing.
WITH due AS (
  SELECT k.id, now() - make_interval(secs => given.ago_s) AS used
  FROM unnest($1::text[], $2::float8[]) AS given (id, ago_s) JOIN rota.api_key k ON k.id = given.id
  WHERE k.ts_last_used IS NULL OR k.ts_last_used < now() - make_interval(secs => given.ago_s + 60)
  FOR UPDATE OF k SKIP LOCKED
)
UPDATE rota.api_key k SET ts_last_used = due.used FROM due WHERE k.id = due.id
