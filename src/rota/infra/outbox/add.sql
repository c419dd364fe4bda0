-- Queue messages in the caller's transaction, in their order; the relays are woken when it commits.
WITH queued AS (
  INSERT INTO rota.outbox (subject, msg_id, headers, payload)
  SELECT given.subject, given.msg_id, given.headers::jsonb, given.payload
  FROM unnest($1::text[], $2::text[], $3::text[], $4::bytea[])
    WITH ORDINALITY AS given (subject, msg_id, headers, payload, place)
  ORDER BY given.place
)
SELECT pg_notify('rota_outbox', '')
