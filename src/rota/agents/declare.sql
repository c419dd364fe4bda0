-- Make agents known, or change what they are. One whose schedule changed is due by the new one ($6), counted from now.
INSERT INTO rota.agent AS a (name, shard_group, spec, ts_due, ts_slot)
SELECT given.name, given.shard_group, given.spec::jsonb, to_timestamp(given.due_ms / 1000.0), to_timestamp(given.slot_ms / 1000.0)
FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[], $5::bigint[]) AS given (name, shard_group, spec, due_ms, slot_ms)
ORDER BY given.name
ON CONFLICT (name) DO UPDATE
SET shard_group = EXCLUDED.shard_group, spec = EXCLUDED.spec,
    ts_due = CASE WHEN a.spec -> 'schedule' = EXCLUDED.spec -> 'schedule' THEN a.ts_due
                  ELSE (SELECT to_timestamp(n.next_ms / 1000.0) FROM unnest($1::text[], $6::bigint[]) AS n (name, next_ms)
                        WHERE n.name = a.name) END,
    ts_slot = CASE WHEN a.spec -> 'schedule' = EXCLUDED.spec -> 'schedule' THEN a.ts_slot
                   ELSE (SELECT to_timestamp(n.next_ms / 1000.0) FROM unnest($1::text[], $6::bigint[]) AS n (name, next_ms)
                         WHERE n.name = a.name) END
WHERE (a.spec, a.shard_group) IS DISTINCT FROM (EXCLUDED.spec, EXCLUDED.shard_group)
