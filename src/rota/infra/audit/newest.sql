-- The newest entries before number $1 (null: all), by actor $2 and action $3 if given, at most $4.
SELECT seq, at, actor, action, target, detail::text AS detail
FROM rota.audit
WHERE ($1::bigint IS NULL OR seq < $1) AND ($2::text IS NULL OR actor = $2) AND ($3::text IS NULL OR action = $3)
ORDER BY seq DESC LIMIT $4::int
