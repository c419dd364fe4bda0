-- Forget the slot $1 if everything in it has ended, waiting $2 ms for its lock. Null: the oldest, by its rows alone.
SELECT rota.queue_prune(coalesce($1::int, ((rota.queue_generation() + 1) % 7)::int), $2::int, $1::int IS NULL)
