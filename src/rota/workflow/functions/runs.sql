-- Every end of a job inserts into job_done, so none is missed; jobs without a workflow_id cost next to nothing. A job
-- may name any run, so jobs of another show are ignored.
CREATE OR REPLACE FUNCTION rota.is_uuid(given text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
  SELECT given ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
$$;

CREATE OR REPLACE FUNCTION rota.workflow_hear() RETURNS trigger
LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
  IF EXISTS (SELECT FROM ended e WHERE e.workflow_id IS NOT NULL) THEN
    INSERT INTO rota.workflow_news (kind, workflow_id, pk_show, pk_job, state, reason, pk_layer, frames, request, ts_at)
    SELECT CASE WHEN EXISTS (SELECT FROM rota.saga_entry u WHERE u.pk_undo = e.pk_job) THEN 'undo'
                WHEN r.pk_run IS NOT NULL THEN 'job' ELSE 'free' END,
           e.workflow_id, e.pk_show, e.pk_job, e.state, e.reason, e.layers[1].pk_layer, e.layers[1].frames, e.request,
           e.ts_finished
    FROM ended e LEFT JOIN LATERAL (
      SELECT r.pk_run FROM rota.workflow_run r
      WHERE r.pk_run = CASE WHEN rota.is_uuid(e.workflow_id) THEN e.workflow_id::uuid END AND r.pk_show = e.pk_show
        AND r.ts_ended IS NULL AND r.state <> 'COMPENSATING' LIMIT 1
    ) AS r ON true
    WHERE e.workflow_id IS NOT NULL;
  END IF;
  RETURN NULL;
END $$;

CREATE OR REPLACE TRIGGER workflow_hear AFTER INSERT ON rota.job_done
  REFERENCING NEW TABLE AS ended FOR EACH STATEMENT EXECUTE FUNCTION rota.workflow_hear();

-- Writes the decisions of an advance, for many runs. A caller with an outdated fence writes nothing. Runs are looked up
-- by key and then hash-joined: the planner does not know their number.
CREATE OR REPLACE FUNCTION rota.workflow_write(
  runs uuid[], fences bigint[], new_states text[], new_steps bytea[], new_outputs bytea[], new_errors text[], ended boolean[],
  told jsonb[],
  t_runs uuid[], t_places smallint[], t_attempts integer[], t_dues_ms bigint[],
  u_runs uuid[], u_places smallint[], u_attempts integer[],
  v_runs uuid[], v_places smallint[], v_values bytea[], triggers text[]
) RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off SET enable_nestloop = off AS $$
DECLARE
  written integer;
  done uuid[] := ARRAY(SELECT g.pk_run FROM unnest(runs, new_states) AS g (pk_run, state) WHERE g.state = 'SUCCEEDED');
BEGIN
  UPDATE rota.workflow_run r SET
    state = g.state, steps = g.steps, output = g.output, error = g.error, fence = r.fence + 1,
    ts_ended = CASE WHEN g.over THEN clock_timestamp() END
  FROM unnest(runs, fences, new_states, new_steps, new_outputs, new_errors, ended)
    AS g (pk_run, fence, state, steps, output, error, over)
  WHERE r.pk_run = ANY (runs) AND r.pk_run = g.pk_run AND r.fence = g.fence AND r.ts_ended IS NULL;
  GET DIAGNOSTICS written = ROW_COUNT;
  IF written <> cardinality(runs) THEN
    RAISE EXCEPTION 'a run was advanced by somebody else' USING ERRCODE = 'RT001';
  END IF;

  INSERT INTO rota.workflow_event (pk_run, fence, at, told)
  SELECT g.pk_run, g.fence, clock_timestamp(), g.told FROM unnest(runs, fences, told) AS g (pk_run, fence, told)
  WHERE g.told IS NOT NULL;

  -- A due timer may be locked by a scan that may wait for this transaction: it is skipped, and fires without effect.
  IF cardinality(u_runs) > 0 THEN
    DELETE FROM rota.workflow_timer WHERE ctid = ANY (ARRAY(
      SELECT t.ctid FROM rota.workflow_timer t JOIN unnest(u_runs, u_places, u_attempts) AS g (pk_run, place, attempt)
        ON t.pk_run = g.pk_run AND t.place = g.place AND t.attempt = g.attempt
      WHERE t.pk_run = ANY (u_runs) FOR UPDATE OF t SKIP LOCKED));
  END IF;
  IF cardinality(t_runs) > 0 THEN
    INSERT INTO rota.workflow_timer (pk_run, place, attempt, ts_due)
    SELECT g.pk_run, g.place, g.attempt, to_timestamp(g.due_ms / 1000.0)
    FROM unnest(t_runs, t_places, t_attempts, t_dues_ms) AS g (pk_run, place, attempt, due_ms);
  END IF;
  IF cardinality(v_runs) > 0 THEN
    INSERT INTO rota.workflow_value (pk_run, place, value)
    SELECT * FROM unnest(v_runs, v_places, v_values) ON CONFLICT (pk_run, place) DO UPDATE SET value = EXCLUDED.value;
  END IF;

  -- The recorded compensations of a run are obsolete once it has succeeded.
  IF cardinality(done) > 0 AND EXISTS (SELECT FROM rota.saga s WHERE s.state = 'open') THEN
    DELETE FROM rota.saga s USING rota.workflow_run r
    WHERE r.pk_run = ANY (done) AND s.workflow_id = ANY (done::text[]) AND s.workflow_id = r.pk_run::text
      AND s.pk_show = r.pk_show AND s.state = 'open';
  END IF;

  -- Runs with a parent: it receives their end and end state.
  IF true = ANY (ended) THEN
    INSERT INTO rota.workflow_news (kind, workflow_id, pk_show, pk_job, state, reason, request)
    SELECT 'run', r.pk_parent::text, r.pk_show, r.pk_run, r.state, r.error, convert_to(g.trigger, 'UTF8')
    FROM unnest(runs, ended, triggers) AS g (pk_run, over, trigger) JOIN rota.workflow_run r ON r.pk_run = g.pk_run
    WHERE r.pk_run = ANY (runs) AND g.over AND r.pk_parent IS NOT NULL;
  END IF;
END $$;
