-- Lock order: beginning, ending, seizing and changing runs lock the agents first, in the order of their names.

-- Acquires runs for agents that may begin. Returns a row per name: its verdict, and the action for the others.
CREATE OR REPLACE FUNCTION rota.agents_begin(of_lease text, of_fence bigint, by_replica text, names text[], numbers bigint[], at_ms bigint,
                                  timeouts_ms bigint[])
RETURNS TABLE (name text, verdict text, due_ms bigint, slot_ms bigint, streak integer, backfill boolean, token bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  at timestamptz := to_timestamp(at_ms / 1000.0);
BEGIN
  PERFORM rota.assert_fence(of_lease, of_fence);
  PERFORM FROM rota.agent a WHERE a.name = ANY (names) ORDER BY a.name FOR NO KEY UPDATE;
  INSERT INTO rota.agent_running (name, run, lease, fence, replica, backfill, ts_slot, ts_due, ts_acquired, ts_deadline)
  SELECT a.name, asked.number, of_lease, of_fence, by_replica, of.backfill, CASE WHEN of.backfill THEN a.ts_backfill_slot ELSE a.ts_slot END,
         CASE WHEN of.backfill THEN a.ts_backfill_due ELSE a.ts_due END, at, at + make_interval(secs => asked.timeout_ms / 1000.0)
  FROM unnest(names, numbers, timeouts_ms) AS asked (name, number, timeout_ms) JOIN rota.agent a ON a.name = asked.name
  CROSS JOIN LATERAL (SELECT coalesce(a.ts_due > at, true) AS backfill) AS of
  WHERE NOT a.paused AND a.ts_next <= at
  ON CONFLICT DO NOTHING;
  RETURN QUERY
    SELECT asked.name,
           CASE WHEN r.run = asked.number THEN 'begun' WHEN a.name IS NULL THEN 'unknown' WHEN r.run IS NOT NULL THEN 'running'
                WHEN a.paused THEN 'paused' ELSE 'early' END,
           (extract(epoch FROM a.ts_next) * 1000)::bigint, (extract(epoch FROM r.ts_slot) * 1000)::bigint, coalesce(a.streak, 0),
           coalesce(r.backfill, false), coalesce(r.token, 0)
    FROM unnest(names, numbers) AS asked (name, number)
    LEFT JOIN rota.agent a ON a.name = asked.name LEFT JOIN rota.agent_running r ON r.name = asked.name;
END $$;

COMMENT ON FUNCTION rota.agents_begin IS
  'Idempotent: a retry with the same numbers, after a lost reply, returns the runs that were begun.';

-- Shared by all ways to end a run: deletes it, adds its history and the next due time. Returns rows for owned runs
-- only.
CREATE OR REPLACE FUNCTION rota.agents_ended(ended jsonb) RETURNS TABLE (name text, run bigint, due_ms bigint)
LANGUAGE sql AS $$
  WITH told AS (
    SELECT *, to_timestamp(due_ms / 1000.0) AS ts_due, to_timestamp(slot_ms / 1000.0) AS ts_slot,
           outcome IN ('CANCELLED', 'LOST') AS is_repeated
    FROM jsonb_to_recordset(ended) AS e
      (name text, run bigint, outcome text, failure text, error text, took_ms bigint, streak integer, due_ms bigint, slot_ms bigint)
  ), gone AS (
    DELETE FROM rota.agent_running r USING told t WHERE r.name = t.name AND r.run = t.run
    RETURNING r.*, r.ts_acquired + make_interval(secs => t.took_ms / 1000.0) AS ts_ended
  ), planned AS (
    UPDATE rota.agent a
    SET ts_due = CASE WHEN a.queued THEN least(a.ts_due, g.ts_ended) WHEN g.backfill THEN a.ts_due ELSE t.ts_due END,
        ts_slot = CASE WHEN t.is_repeated AND NOT g.backfill THEN a.ts_slot
                       WHEN a.queued THEN g.ts_ended WHEN g.backfill THEN a.ts_slot ELSE t.ts_slot END,
        -- Unless the backfill was stopped or replaced meanwhile.
        ts_backfill_due = CASE WHEN NOT g.backfill OR a.ts_backfill_slot IS DISTINCT FROM g.ts_slot THEN a.ts_backfill_due
                               WHEN t.is_repeated OR t.ts_slot <= a.ts_backfill_until THEN t.ts_due END,
        ts_backfill_slot = CASE WHEN NOT g.backfill OR a.ts_backfill_slot IS DISTINCT FROM g.ts_slot OR t.is_repeated
                                THEN a.ts_backfill_slot
                                WHEN t.ts_slot <= a.ts_backfill_until THEN t.ts_slot END,
        queued = false, streak = coalesce(t.streak, a.streak), runs = a.runs + 1,
        failure = CASE WHEN t.outcome = 'SUCCEEDED' THEN a.failure ELSE t.failure END,
        error = CASE WHEN t.outcome = 'SUCCEEDED' THEN a.error ELSE t.error END
    FROM gone g JOIN told t ON t.name = g.name WHERE a.name = g.name
    RETURNING a.name, a.runs, a.paused, a.ts_next
  ), noted AS (
    INSERT INTO rota.agent_run AS h (name, place, run, replica, outcome, failure, error, took_ms, backfill, ts_slot, ts_due, ts_started)
    SELECT g.name, (p.runs - 1) % 50, g.run, g.replica, t.outcome, t.failure, t.error, t.took_ms, g.backfill, g.ts_slot, g.ts_due,
           g.ts_acquired
    FROM gone g JOIN told t ON t.name = g.name JOIN planned p ON p.name = g.name
    ON CONFLICT (name, place) DO UPDATE
    SET run = EXCLUDED.run, replica = EXCLUDED.replica, outcome = EXCLUDED.outcome, failure = EXCLUDED.failure,
        error = EXCLUDED.error, took_ms = EXCLUDED.took_ms, backfill = EXCLUDED.backfill, ts_slot = EXCLUDED.ts_slot,
        ts_due = EXCLUDED.ts_due, ts_started = EXCLUDED.ts_started
  )
  SELECT g.name, g.run, CASE WHEN NOT p.paused THEN (extract(epoch FROM p.ts_next) * 1000)::bigint END
  FROM gone g JOIN planned p ON p.name = g.name
$$;

-- The owner ends its runs. A run with another owner by now is left alone and missing from the result.
CREATE OR REPLACE FUNCTION rota.agents_end(of_lease text, of_fence bigint, ended jsonb) RETURNS TABLE (name text, run bigint, due_ms bigint)
LANGUAGE plpgsql AS $$
BEGIN
  PERFORM rota.assert_fence(of_lease, of_fence);
  PERFORM FROM rota.agent a WHERE a.name IN (SELECT e.value ->> 'name' FROM jsonb_array_elements(ended) AS e)
  ORDER BY a.name FOR NO KEY UPDATE;
  RETURN QUERY SELECT * FROM rota.agents_ended(ended);
END $$;

-- Runs whose member has been gone for `grace_s`: they are lost, and their agents are due immediately.
CREATE OR REPLACE FUNCTION rota.agents_seize(of_lease text, of_fence bigint, grace_s float8, most integer)
RETURNS TABLE (name text, run bigint, due_ms bigint)
LANGUAGE plpgsql AS $$
DECLARE
  found text[];
BEGIN
  PERFORM rota.assert_fence(of_lease, of_fence);
  found := ARRAY(SELECT r.name FROM rota.agent_running r WHERE NOT rota.agents_member_lives(r.lease, r.fence, grace_s)
                 ORDER BY r.name LIMIT most);
  IF found = '{}' THEN
    RETURN;
  END IF;
  PERFORM FROM rota.agent a WHERE a.name = ANY (found) ORDER BY a.name FOR NO KEY UPDATE;
  RETURN QUERY SELECT * FROM rota.agents_ended((
    SELECT coalesce(jsonb_agg(jsonb_build_object(
      'name', r.name, 'run', r.run, 'outcome', 'LOST', 'error', format('Its replica %s is gone.', r.replica), 'streak', a.streak,
      'took_ms', greatest(0, (extract(epoch FROM clock_timestamp() - r.ts_acquired) * 1000)::bigint),
      'due_ms', (extract(epoch FROM r.ts_due) * 1000)::bigint)), '[]')
    FROM rota.agent_running r JOIN rota.agent a ON a.name = r.name
    WHERE r.name = ANY (found) AND NOT rota.agents_member_lives(r.lease, r.fence, grace_s)));
END $$;

CREATE OR REPLACE FUNCTION rota.agents_member_lives(of_lease text, of_fence bigint, grace_s float8) RETURNS boolean
LANGUAGE sql AS $$
  SELECT EXISTS (SELECT FROM rota.lease l WHERE l.name = of_lease AND l.fence = of_fence AND l.holder IS NOT NULL
                 AND l.expires_at > clock_timestamp() - make_interval(secs => grace_s))
$$;
