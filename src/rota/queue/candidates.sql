-- Lanes of these queues, or of all, in which something may be claimed.
SELECT lane_id, queue, priority, waiting, parked FROM rota.queue_candidates($1::text[])
