-- Queues by name, those among $1 or all.
SELECT queue, enqueue_shards AS shards, paused, dlq_on_fail FROM rota.queues
WHERE $1::text[] IS NULL OR queue = ANY ($1) ORDER BY queue
