-- The last runs of an agent, the latest first.
SELECT run, replica, outcome, failure, error, took_ms, backfill, ts_slot, ts_due, ts_started
FROM rota.agent_run WHERE name = $1 ORDER BY ts_started DESC, run DESC LIMIT $2
