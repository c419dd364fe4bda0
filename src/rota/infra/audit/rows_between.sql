-- The rows of the chain after number $1 up to number $2.
SELECT seq, at, actor, action, target, detail::text AS detail, prev_hash, hash
FROM rota.audit WHERE seq > $1 AND seq <= $2 ORDER BY seq
