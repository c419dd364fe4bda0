-- Which of the queues $1 are the engine's.
SELECT queue FROM rota.queue_class WHERE queue = ANY ($1::text[])
