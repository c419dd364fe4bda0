-- Move what still lives in the oldest slot out of the ring, $2 entries at most, waiting $1 ms for its lock.
SELECT rota.queue_carry($1::int, $2::int)
