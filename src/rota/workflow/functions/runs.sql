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

-- Runs with inbox rows or a due timer, with all of them, locked. Rows of a run that another transaction has locked
-- stay. A timer is due by the clock of this server alone. Rows locked here are found again by their ctid, and no table
-- is joined: statistics of constantly emptied tables are always wrong.
CREATE OR REPLACE FUNCTION rota.workflow_take(most integer, since bigint) RETURNS SETOF rota.workflow_taken
LANGUAGE plpgsql SET enable_seqscan = off SET enable_nestloop = off AS $$
DECLARE
  moment timestamptz := clock_timestamp();  -- read once: an index cannot be searched for a volatile value
  news record;
  due record;
  taken bigint;
BEGIN
  -- Outputs under scan are held back: the next step would read what is quarantined a moment later (ADR 20).
  SELECT array_agg(n.ctid) AS rows, array_agg(n.workflow_id::uuid) AS runs INTO news
  FROM (SELECT n.ctid, n.workflow_id FROM rota.workflow_news n
        WHERE n.news_id >= since AND n.kind NOT IN ('undo', 'free')
          AND (SELECT s.pk_job FROM rota.scan s WHERE s.pk_job = n.pk_job LIMIT 1) IS NULL
        ORDER BY n.news_id LIMIT most FOR UPDATE SKIP LOCKED) AS n;
  SELECT array_agg(t.ctid) AS rows, array_agg(t.pk_run) AS runs INTO due
  FROM (SELECT t.ctid, t.pk_run FROM rota.workflow_timer t WHERE t.ts_due <= moment
        ORDER BY t.ts_due LIMIT most FOR UPDATE SKIP LOCKED) AS t;
  IF news.rows IS NULL AND due.rows IS NULL THEN
    RETURN;
  END IF;

  RETURN QUERY
  WITH run AS MATERIALIZED (
    SELECT r.* FROM rota.workflow_run r WHERE r.pk_run = ANY (news.runs || due.runs) AND r.ts_ended IS NULL
    ORDER BY r.pk_run FOR NO KEY UPDATE SKIP LOCKED
  ), heard AS (
    DELETE FROM rota.workflow_news n
    WHERE n.ctid = ANY (news.rows) AND n.workflow_id = ANY (
      CASE n.kind WHEN 'job' THEN ARRAY(SELECT r.pk_run::text FROM run r WHERE r.state <> 'COMPENSATING')
                  ELSE ARRAY(SELECT r.pk_run::text FROM run r) END)
    RETURNING n.*
  ), fired AS (
    DELETE FROM rota.workflow_timer t
    WHERE t.ctid = ANY (due.rows) AND t.pk_run = ANY (ARRAY(SELECT r.pk_run FROM run r))
    RETURNING t.*
  ), told AS (
    SELECT h.workflow_id::uuid AS pk_run, h.news_id AS at, NULL::timestamptz AS due_at, h.kind, h.pk_job, h.state AS ended_as,
           h.reason, h.pk_layer, h.frames, e.value, e.value_at, e.code, e.error, h.request, NULL::smallint AS place,
           NULL::integer AS attempt
    FROM heard h LEFT JOIN LATERAL (
      -- The end of a job's only frame is written in the transaction of the job's end, so both have the same time.
      SELECT CASE WHEN rota.output_readable(e.output) THEN e.value END AS value,
             CASE WHEN rota.output_readable(e.output) THEN e.value_at END AS value_at, e.code, e.error
      FROM rota.frame_end e
      WHERE h.frames = 1 AND e.pk_layer = h.pk_layer AND e.ts_finished = h.ts_at
      ORDER BY e.attempt DESC LIMIT 1
    ) AS e ON true
    UNION ALL
    SELECT f.pk_run, NULL, f.ts_due, 'timer', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, f.place, f.attempt
    FROM fired f
  ), ordered AS (
    SELECT t.*, row_number() OVER (PARTITION BY t.pk_run ORDER BY t.at, t.due_at) = 1 AS is_first FROM told t
  )
  SELECT r.pk_run, r.pk_show, r.pk_workflow, r.state, r.fence, r.pk_root, r.depth, r.actor, rota.now_ms(),
         CASE WHEN o.is_first THEN r.steps END, CASE WHEN o.is_first THEN r.input END,
         o.at, o.kind, o.pk_job, o.ended_as, o.reason, o.pk_layer, o.frames, o.value, o.value_at, o.code, o.error, o.request,
         o.place, o.attempt
  FROM ordered o JOIN run r USING (pk_run) ORDER BY r.pk_run, o.at, o.due_at;
  GET DIAGNOSTICS taken = ROW_COUNT;

  IF taken < coalesce(cardinality(news.rows), 0) + coalesce(cardinality(due.rows), 0) THEN
    -- Runs that have ended receive nothing any more; ends of jobs are left to sagas.
    UPDATE rota.workflow_news n SET kind = 'free'
    WHERE n.ctid = ANY (news.rows) AND n.kind = 'job' AND (
      SELECT r.pk_run FROM rota.workflow_run r
      WHERE r.pk_run = n.workflow_id::uuid AND r.ts_ended IS NULL AND r.state <> 'COMPENSATING' LIMIT 1) IS NULL;
    DELETE FROM rota.workflow_news n
    WHERE n.ctid = ANY (news.rows) AND n.kind <> 'job' AND (
      SELECT r.pk_run FROM rota.workflow_run r WHERE r.pk_run = n.workflow_id::uuid AND r.ts_ended IS NULL LIMIT 1) IS NULL;
    DELETE FROM rota.workflow_timer t
    WHERE t.ctid = ANY (due.rows) AND (
      SELECT r.pk_run FROM rota.workflow_run r WHERE r.pk_run = t.pk_run AND r.ts_ended IS NULL LIMIT 1) IS NULL;
  END IF;
END $$;

COMMENT ON FUNCTION rota.workflow_take IS 'Timers are deleted, news too: whoever dies before the commit has taken nothing.';

-- Pending work. By index alone: a constantly emptied table looks small to the planner, and may be full of dead rows.
CREATE OR REPLACE FUNCTION rota.workflow_look(since bigint, OUT runs boolean, OUT sagas boolean, OUT in_ms bigint)
LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
  in_ms := (SELECT ceil(extract(epoch FROM t.ts_due - clock_timestamp()) * 1000) FROM rota.workflow_timer t
            ORDER BY t.ts_due LIMIT 1);
  runs := coalesce(in_ms <= 0, false) OR EXISTS (
    SELECT FROM rota.workflow_news n WHERE n.news_id >= since AND n.kind NOT IN ('undo', 'free'));
  sagas := EXISTS (SELECT FROM rota.workflow_news n WHERE n.kind IN ('undo', 'free'))
    OR EXISTS (SELECT FROM rota.saga s WHERE s.state = 'rolling_back');
END $$;

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
