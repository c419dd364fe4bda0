-- no transaction
CREATE UNIQUE INDEX CONCURRENTLY IF NOT EXISTS queue_counts_key ON rota.queue_terminal_live_counts (lane_id, ready_slot);
