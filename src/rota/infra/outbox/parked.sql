-- The oldest $1 messages that were put aside.
SELECT id, subject, msg_id, octet_length(payload) AS bytes, created_at, parked_at, reason
FROM rota.outbox_parked
ORDER BY id
LIMIT $1::int
