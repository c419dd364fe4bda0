-- Keep values under their hashes, each once a day.
INSERT INTO rota.blob (sha256, data)
SELECT DISTINCT ON (given.sha256) given.sha256, given.data
FROM unnest($1::bytea[], $2::bytea[]) AS given (sha256, data)
WHERE NOT EXISTS (SELECT FROM rota.blob b WHERE b.sha256 = given.sha256 AND b.ts_put >= date_trunc('day', now()))
