-- Write again what was put on the day $1 and is in use.
INSERT INTO rota.blob (sha256, data)
SELECT DISTINCT ON (b.sha256) b.sha256, b.data FROM rota.blob b
WHERE b.ts_put >= $1::date::timestamp AT TIME ZONE 'UTC' AND b.ts_put < ($1::date + 1)::timestamp AT TIME ZONE 'UTC'
  AND b.sha256 = ANY ($2::bytea[])
