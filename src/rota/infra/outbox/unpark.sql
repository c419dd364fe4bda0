-- Queue parked messages again, as new ones at the end.
WITH taken AS (
  DELETE FROM rota.outbox_parked WHERE id = ANY ($1::bigint[])
  RETURNING id, subject, msg_id, headers, payload, created_at
), queued AS (
  INSERT INTO rota.outbox (subject, msg_id, headers, payload, created_at)
  SELECT subject, msg_id, headers, payload, created_at FROM taken ORDER BY id
  RETURNING id
)
SELECT count(*) AS unparked, pg_notify('rota_outbox', '') FROM queued
