-- Days of which everything was put before $1, the oldest first.
SELECT to_date(right(c.relname, 8), 'YYYYMMDD') AS day
FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = 'rota.blob'::regclass AND c.relname ~ '^blob_[0-9]{8}$'
  AND (to_date(right(c.relname, 8), 'YYYYMMDD') + 1)::timestamp AT TIME ZONE 'UTC' <= $1::timestamptz
ORDER BY day
