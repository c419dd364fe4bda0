-- no transaction
CREATE INDEX CONCURRENTLY IF NOT EXISTS queue_returned_turns ON rota.queue_returned (lane_id, returned_at, first_seq)
  WHERE parked_job IS NULL AND turn_of IS NOT NULL;
