-- name: append
-- Append entries to the chain in the caller's transaction; returns its new head.
SELECT seq, hash FROM rota.audit_append($1::text[], $2::text[], $3::text[], $4::jsonb[])

-- name: newest
-- The newest entries before number $1 (null: all), by actor $2 and action $3 if given, at most $4.
SELECT seq, at, actor, action, target, detail::text AS detail
FROM rota.audit
WHERE ($1::bigint IS NULL OR seq < $1) AND ($2::text IS NULL OR actor = $2) AND ($3::text IS NULL OR action = $3)
ORDER BY seq DESC LIMIT $4::int

-- name: head
-- The head of the chain as recorded by its writers.
SELECT seq, hash FROM rota.audit_head

-- name: link_at
-- The stored hash of one row.
SELECT hash FROM rota.audit WHERE seq = $1

-- name: rows_between
-- The rows of the chain after number $1 up to number $2.
SELECT seq, at, actor, action, target, detail::text AS detail, prev_hash, hash
FROM rota.audit WHERE seq > $1 AND seq <= $2 ORDER BY seq

-- name: sizes_after
-- Size in bytes of each of the next $2 rows after number $1.
SELECT seq, octet_length(actor) + octet_length(action) + octet_length(target) + octet_length(detail::text) AS bytes
FROM rota.audit WHERE seq > $1 ORDER BY seq LIMIT $2
