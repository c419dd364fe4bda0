-- Pause or resume an agent, move its due time, or want one more run of it; when it runs next, in ms.
UPDATE rota.agent
SET paused = $2, queued = $3, ts_due = to_timestamp($4::bigint / 1000.0), ts_slot = to_timestamp($5::bigint / 1000.0)
WHERE name = $1
RETURNING (extract(epoch FROM ts_next) * 1000)::bigint
