-- Run an agent for past slots, from $3 to $4, from $2 on; or, with nulls, no longer. When it runs next, in ms.
UPDATE rota.agent
SET ts_backfill_due = to_timestamp($2::bigint / 1000.0), ts_backfill_slot = to_timestamp($3::bigint / 1000.0),
    ts_backfill_until = to_timestamp($4::bigint / 1000.0)
WHERE name = $1
RETURNING (extract(epoch FROM ts_next) * 1000)::bigint
