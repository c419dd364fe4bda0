-- Exact counts of these queues, or of all.
SELECT queue, waiting, running, deferred, completed, failed, cancelled, dead FROM rota.queue_counts_exact($1::text[])
