-- Revoke key $1; no row when that was done before.
UPDATE rota.api_key SET ts_revoked = now() WHERE id = $1 AND ts_revoked IS NULL RETURNING id
