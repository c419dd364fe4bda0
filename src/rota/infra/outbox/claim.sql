-- Lock the next $2 messages after $1 that no relay has, hand out those that begin within $3 bytes, and be idle for $4 ms at most.
WITH locked AS MATERIALIZED (
  SELECT id, octet_length(payload) AS bytes
  FROM rota.outbox
  WHERE id > $1::bigint
  ORDER BY id
  LIMIT $2::int
  FOR UPDATE SKIP LOCKED
), measured AS (
  SELECT id, sum(bytes) OVER (ORDER BY id) - bytes AS bytes_before FROM locked
)
SELECT o.id, o.subject, o.msg_id, o.headers::text AS headers, o.payload,
  -- A relay that is paused while it holds rows must not keep them from the others.
  (SELECT set_config('idle_in_transaction_session_timeout', $4::text, true)) AS idle_limit_ms
FROM measured m
JOIN rota.outbox o ON o.id = m.id
WHERE m.bytes_before < $3::bigint
ORDER BY o.id
