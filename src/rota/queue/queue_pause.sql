-- Pause the queue $1, or let it go on, and wake whoever claims from it.
UPDATE rota.queues SET paused = $2::boolean WHERE queue = $1::text
