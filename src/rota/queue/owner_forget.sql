-- Forget a dead owner that has nothing left to give back.
DELETE FROM rota.queue_owners WHERE owner = $1::bigint AND dead
