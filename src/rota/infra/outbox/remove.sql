-- Forget the messages that the bus has confirmed.
DELETE FROM rota.outbox WHERE id = ANY ($1::bigint[])
