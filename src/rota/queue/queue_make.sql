-- Make the queue $1 with lanes for the priorities $2, or change its settings; null keeps what is there.
WITH made AS (
  INSERT INTO rota.queues AS q (queue, enqueue_shards, dlq_on_fail)
  VALUES ($1::text, coalesce($3::smallint, 4), coalesce($4::boolean, false))
  ON CONFLICT (queue) DO UPDATE
  SET enqueue_shards = coalesce($3::smallint, q.enqueue_shards), dlq_on_fail = coalesce($4::boolean, q.dlq_on_fail)
  RETURNING queue, enqueue_shards
)
INSERT INTO rota.queue_lanes (queue, priority, enqueue_shard)
SELECT made.queue, priority, shard FROM made, unnest($2::smallint[]) AS priority,
  generate_series(0, made.enqueue_shards - 1) AS shard
ON CONFLICT DO NOTHING
