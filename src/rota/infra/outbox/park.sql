-- Put messages aside that can never be published, each with its reason.
WITH taken AS (
  DELETE FROM rota.outbox WHERE id = ANY ($1::bigint[])
  RETURNING id, subject, msg_id, headers, payload, created_at
)
INSERT INTO rota.outbox_parked (id, subject, msg_id, headers, payload, created_at, reason)
SELECT taken.id, taken.subject, taken.msg_id, taken.headers, taken.payload, taken.created_at, why.reason
FROM taken
JOIN unnest($1::bigint[], $2::text[]) AS why (id, reason) ON why.id = taken.id
