-- The audit trail after entry $1, $2 entries at most, with the show that each concerns.
SELECT seq, (extract(epoch FROM at) * 1000)::bigint AS at_ms, action, target, detail ->> 'show' AS show
FROM rota.audit WHERE seq > $1::bigint ORDER BY seq LIMIT $2::int
