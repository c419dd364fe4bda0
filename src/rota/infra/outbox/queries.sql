-- name: add
-- Queue messages in the caller's transaction, in order; its commit notifies the relays.
WITH queued AS (
  INSERT INTO rota.outbox (subject, msg_id, headers, payload)
  SELECT given.subject, given.msg_id, given.headers::jsonb, given.payload
  FROM unnest($1::text[], $2::text[], $3::text[], $4::bytea[])
    WITH ORDINALITY AS given (subject, msg_id, headers, payload, place)
  ORDER BY given.place
)
SELECT pg_notify('rota_outbox', '')

-- name: parked
-- The oldest $1 parked messages.
SELECT id, subject, msg_id, octet_length(payload) AS bytes, created_at, parked_at, reason
FROM rota.outbox_parked
ORDER BY id
LIMIT $1::int

-- name: unpark
-- Queue parked messages again, at the end.
WITH taken AS (
  DELETE FROM rota.outbox_parked WHERE id = ANY ($1::bigint[])
  RETURNING id, subject, msg_id, headers, payload, created_at
), queued AS (
  INSERT INTO rota.outbox (subject, msg_id, headers, payload, created_at)
  SELECT subject, msg_id, headers, payload, created_at FROM taken ORDER BY id
  RETURNING id
)
SELECT count(*) AS unparked, pg_notify('rota_outbox', '') FROM queued

-- name: claim
-- Lock the next $2 unlocked messages after $1, return those starting within $3 bytes, and limit idling to $4 ms.
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
  -- A paused relay must not keep its rows locked.
  (SELECT set_config('idle_in_transaction_session_timeout', $4::text, true)) AS idle_limit_ms
FROM measured m
JOIN rota.outbox o ON o.id = m.id
WHERE m.bytes_before < $3::bigint
ORDER BY o.id

-- name: has_messages
-- Whether there are messages after $1, locked or not.
SELECT EXISTS (SELECT FROM rota.outbox WHERE id > $1::bigint)

-- name: depth
-- Number of waiting messages (capped at $1), age of the first one, and number of parked messages.
SELECT
  (SELECT count(*) FROM (SELECT FROM rota.outbox LIMIT $1::int) AS waiting) AS depth,
  (SELECT extract(epoch FROM clock_timestamp() - created_at)::float8 FROM rota.outbox ORDER BY id LIMIT 1)
    AS oldest_age_s,
  (SELECT count(*) FROM (SELECT FROM rota.outbox_parked LIMIT $1::int) AS aside) AS parked

-- name: park
-- Park messages that can never be published, each with its reason.
WITH taken AS (
  DELETE FROM rota.outbox WHERE id = ANY ($1::bigint[])
  RETURNING id, subject, msg_id, headers, payload, created_at
)
INSERT INTO rota.outbox_parked (id, subject, msg_id, headers, payload, created_at, reason)
SELECT taken.id, taken.subject, taken.msg_id, taken.headers, taken.payload, taken.created_at, why.reason
FROM taken
JOIN unnest($1::bigint[], $2::text[]) AS why (id, reason) ON why.id = taken.id

-- name: remove
-- Delete the messages that NATS confirmed.
DELETE FROM rota.outbox WHERE id = ANY ($1::bigint[])
