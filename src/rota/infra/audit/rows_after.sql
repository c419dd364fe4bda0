-- The next $2 rows of the chain after number $1.
SELECT seq, at, actor, action, target, detail::text AS detail, prev_hash, hash
FROM rota.audit WHERE seq > $1 ORDER BY seq LIMIT $2
