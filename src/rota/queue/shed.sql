-- Forget what has ended beside the ring if $1, or else in its oldest slot.
SELECT rota.queue_shed($1::boolean)
