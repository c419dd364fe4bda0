-- name: blob_carry
-- Copy the values of day $1 that are in use to today.
INSERT INTO rota.blob (sha256, data)
SELECT DISTINCT ON (b.sha256) b.sha256, b.data FROM rota.blob b
WHERE b.ts_put >= $1::date::timestamp AT TIME ZONE 'UTC' AND b.ts_put < ($1::date + 1)::timestamp AT TIME ZONE 'UTC'
  AND b.sha256 = ANY ($2::bytea[])

-- name: blob_days
-- Days that ended before $1, oldest first.
SELECT to_date(right(c.relname, 8), 'YYYYMMDD') AS day
FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = 'rota.blob'::regclass AND c.relname ~ '^blob_[0-9]{8}$'
  AND (to_date(right(c.relname, 8), 'YYYYMMDD') + 1)::timestamp AT TIME ZONE 'UTC' <= $1::timestamptz
ORDER BY day

-- name: blob_drop_day
-- Drop the partition of the day $1.
SELECT rota.blob_drop_day($1::date)

-- name: blob_get
-- The value whose hash is $1.
SELECT data FROM rota.blob WHERE sha256 = $1::bytea LIMIT 1

-- name: blob_slice
-- Bytes $2 to $2 + $3 of the value whose hash is $1, counted from 1. The values are stored uncompressed, so only these
-- bytes are read.
SELECT substring(data FROM $2::integer FOR $3::integer) FROM rota.blob WHERE sha256 = $1::bytea LIMIT 1

-- name: blob_make_day
-- Create the partition of day $1, unless it exists or the default partition has rows of that day.
SELECT rota.blob_make_day($1::date)

-- name: blob_put
-- Store values by hash, each once per day.
INSERT INTO rota.blob (sha256, data)
SELECT DISTINCT ON (given.sha256) given.sha256, given.data
FROM unnest($1::bytea[], $2::bytea[]) AS given (sha256, data)
WHERE NOT EXISTS (SELECT FROM rota.blob b WHERE b.sha256 = given.sha256 AND b.ts_put >= date_trunc('day', now()))

-- name: blob_sweep
-- Delete at most $3 unused values put before $1 from the default partition.
DELETE FROM rota.blob_default WHERE ctid = ANY (ARRAY(
  SELECT ctid FROM rota.blob_default WHERE ts_put < $1::timestamptz AND sha256 <> ALL ($2::bytea[]) LIMIT $3::int))
