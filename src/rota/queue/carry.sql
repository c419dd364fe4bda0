-- Move about $2 entries that live on in the oldest slot out of the ring, waiting $1 ms for its lock.
SELECT rota.queue_carry($1::int, $2::int)
