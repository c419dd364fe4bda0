-- Forget the slot $1 if everything in it has ended, waiting $2 ms for its lock.
SELECT rota.queue_prune($1::int, $2::int)
