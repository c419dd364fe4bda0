-- An agent as it is, which nobody begins, ends or changes until we commit.
SELECT a.spec::text AS spec, a.paused, a.queued, (extract(epoch FROM a.ts_due) * 1000)::bigint AS due_ms,
       (extract(epoch FROM a.ts_slot) * 1000)::bigint AS slot_ms,
       a.ts_backfill_slot IS NOT NULL AS backfilling,
       (SELECT r.replica FROM rota.agent_running r WHERE r.name = a.name) AS replica
FROM rota.agent a WHERE a.name = $1 FOR UPDATE
