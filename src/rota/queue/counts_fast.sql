-- Counts of these queues as of the last fold, or of all.
SELECT queue, waiting, running, deferred, completed, failed, cancelled, dead FROM rota.queue_counts_fast($1::text[])
