-- no transaction
CREATE INDEX CONCURRENTLY IF NOT EXISTS queue_returned_first ON rota.queue_returned (lane_id, first_seq)
  WHERE parked_job IS NULL AND turn_of IS NULL;
