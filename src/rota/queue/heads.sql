-- For how long the next frame of each lane has been waiting.
SELECT lane_id, extract(epoch FROM clock_timestamp() - enqueued_at)::float8 AS age_s FROM rota.queue_heads($1::int[])
