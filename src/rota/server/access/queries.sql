-- name: keys_look
-- The keys $1 with digest, principal, grants, state and remaining lifetime.
SELECT k.id, k.digest, k.name, p.name AS principal, p.b_global, coalesce(p.shared_name, '') AS shared_name,
       rota.api_grants(k.id) AS grants,
       CASE WHEN p.ts_disabled IS NOT NULL THEN 'disabled' ELSE rota.api_key_state(k) END AS state,
       extract(epoch FROM k.ts_expires - clock_timestamp())::float8 AS expires_in_s
FROM rota.api_key k JOIN rota.principal p ON p.id = k.principal_id WHERE k.id = ANY ($1::text[])

-- name: key_add
-- Add key $1 of principal $5 with digest $2, name $3 and a lifetime of $4 seconds (NULL: unlimited); no row when the id is
-- taken.
INSERT INTO rota.api_key (id, digest, name, ts_expires, principal_id)
VALUES ($1, $2, $3, now() + make_interval(secs => $4::float8), $5::uuid)
ON CONFLICT (id) DO NOTHING RETURNING id

-- name: key_grant
-- Grant key $1 the roles $2 in the shows $3; a NULL show means every show.
INSERT INTO rota.api_grant (key_id, role, pk_show, b_every)
SELECT $1::text, role, show, show IS NULL FROM unnest($2::text[], $3::uuid[]) AS given (role, show)

-- name: key_list
-- Keys, newest first. $1: include revoked keys; $2: only these ids (NULL: all).
SELECT k.id, k.name, p.name AS principal, rota.api_grants(k.id) AS grants,
       CASE WHEN p.ts_disabled IS NOT NULL AND k.ts_revoked IS NULL THEN 'disabled' ELSE rota.api_key_state(k) END AS state,
       k.ts_created, k.ts_expires, k.ts_last_used, k.ts_revoked
FROM rota.api_key k JOIN rota.principal p ON p.id = k.principal_id
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

-- name: principal_add
-- Add principal $1 of kind $2, global or not ($3); no row when the name is taken.
INSERT INTO rota.principal (name, kind, b_global) VALUES ($1::text, $2::text, $3::boolean)
ON CONFLICT (name) DO NOTHING RETURNING id

-- name: principal_hold
-- Principal $1, which is not disabled before the transaction ends.
SELECT id, ts_disabled FROM rota.principal WHERE name = $1::text FOR SHARE

-- name: principal_list
-- Principals by name, with the number of their keys that are not revoked. $1: only these names (NULL: all).
SELECT p.name, p.kind, p.b_global, p.ts_created, p.ts_disabled, count(k.id) AS keys
FROM rota.principal p LEFT JOIN rota.api_key k ON k.principal_id = p.id AND k.ts_revoked IS NULL
WHERE $1::text[] IS NULL OR p.name = ANY ($1) GROUP BY p.id ORDER BY p.name

-- name: principal_disable
-- Disable principal $1; no row when it is disabled or does not exist.
UPDATE rota.principal SET ts_disabled = now() WHERE name = $1::text AND ts_disabled IS NULL RETURNING id
