-- Agents with what they do now and what came of their last run: those named $1, or all, behind $2, at most $3.
SELECT a.name, a.shard_group, a.spec::text AS spec, a.ts_next, a.ts_backfill_slot, a.ts_backfill_until, a.paused, a.queued, a.streak, a.failure, a.error, a.runs,
       r.run, r.replica, r.ts_acquired, r.ts_deadline, coalesce(r.quarantined, false) AS quarantined,
       h.outcome AS last_outcome, h.took_ms AS last_took_ms, h.ts_started AS last_started
FROM rota.agent a
LEFT JOIN rota.agent_running r ON r.name = a.name
LEFT JOIN rota.agent_run h ON h.name = a.name AND h.place = (a.runs - 1) % 50
WHERE ($1::text[] IS NULL OR a.name = ANY ($1::text[])) AND a.name > $2
ORDER BY a.name LIMIT $3
