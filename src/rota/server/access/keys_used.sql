-- Note that the keys $1 were used $2 seconds ago, each at most once a minute. Rows that somebody else notes are left alone.
WITH due AS (
  SELECT k.id, now() - make_interval(secs => given.ago_s) AS used
  FROM unnest($1::text[], $2::float8[]) AS given (id, ago_s) JOIN rota.api_key k ON k.id = given.id
  WHERE k.ts_last_used IS NULL OR k.ts_last_used < now() - make_interval(secs => given.ago_s + 60)
  FOR UPDATE OF k SKIP LOCKED
)
UPDATE rota.api_key k SET ts_last_used = due.used FROM due WHERE k.id = due.id
