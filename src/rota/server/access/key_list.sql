-- Keys, the newest first; with $1 also those that are revoked, with $2 only those of these ids.
SELECT k.id, k.name, rota.api_grants(k.id) AS grants, rota.api_key_state(k) AS state,
       k.ts_created, k.ts_expires, k.ts_last_used, k.ts_revoked
FROM rota.api_key k
WHERE ($1::boolean OR k.ts_revoked IS NULL) AND ($2::text[] IS NULL OR k.id = ANY ($2))
ORDER BY k.ts_created DESC, k.id
