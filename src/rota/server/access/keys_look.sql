-- What there is to know about whoever shows the keys $1.
SELECT k.id, k.digest, k.name, rota.api_grants(k.id) AS grants, rota.api_key_state(k) AS state,
       extract(epoch FROM k.ts_expires - clock_timestamp())::float8 AS expires_in_s
FROM rota.api_key k WHERE k.id = ANY ($1::text[])
