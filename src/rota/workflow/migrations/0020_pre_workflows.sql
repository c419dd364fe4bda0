-- Workflows: definitions, runs, timers, and the news that runs are advanced by. See docs/adr/0021-workflows.md.
-- Locks, in this order: news and timers (nobody waits for one), runs by id, then whatever submitting locks.

CREATE TABLE rota.workflow (
  pk_workflow bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  pk_show     uuid NOT NULL,
  name        text NOT NULL CHECK (length(name) BETWEEN 1 AND 64),
  version     integer NOT NULL,
  digest      bytea NOT NULL,
  spec        bytea NOT NULL,
  ts_created  timestamptz NOT NULL DEFAULT now(),
  UNIQUE (pk_show, name, version)
);

COMMENT ON TABLE rota.workflow IS 'Every version of every definition; a version is never changed, so runs keep theirs.';
COMMENT ON COLUMN rota.workflow.spec IS 'rota.model.workflow.WorkflowSpec, JSON; digest is that of these bytes.';

CREATE TABLE rota.workflow_run (
  pk_run      uuid PRIMARY KEY,
  pk_show     uuid NOT NULL,
  pk_workflow bigint NOT NULL REFERENCES rota.workflow,
  state       text NOT NULL,
  steps       bytea NOT NULL,
  fence       bigint NOT NULL DEFAULT 0,
  input       bytea NOT NULL,
  output      bytea,
  error       text,
  key         text CHECK (length(key) BETWEEN 1 AND 200),
  pk_parent   uuid,
  pk_root     uuid NOT NULL,
  depth       smallint NOT NULL DEFAULT 0,
  actor       text NOT NULL DEFAULT '',
  ts_started  timestamptz NOT NULL DEFAULT now(),
  ts_ended    timestamptz
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02);  -- room for the next state in the same page

CREATE INDEX ON rota.workflow_run (pk_show, pk_run);
CREATE INDEX ON rota.workflow_run (pk_workflow);
CREATE INDEX ON rota.workflow_run (pk_run) WHERE ts_ended IS NULL;
CREATE UNIQUE INDEX workflow_run_key ON rota.workflow_run (pk_show, key) WHERE key IS NOT NULL;

COMMENT ON COLUMN rota.workflow_run.steps IS 'rota.model.workflow_run.RunNow, msgpack: where each step is.';
COMMENT ON COLUMN rota.workflow_run.fence IS 'Rises with every advance; who writes names the one it has read.';
COMMENT ON COLUMN rota.workflow_run.pk_parent IS 'The run whose step has started this one; pk_root is the first of them, and itself where there is none.';

CREATE TABLE rota.workflow_event (
  pk_run uuid NOT NULL,
  fence  bigint NOT NULL,
  at     timestamptz NOT NULL,
  told   jsonb NOT NULL,
  PRIMARY KEY (pk_run, fence)
);

COMMENT ON TABLE rota.workflow_event IS 'What happened to a run, a row for each advance; rows are only ever added.';

CREATE TABLE rota.workflow_value (
  pk_run uuid NOT NULL,
  place  smallint NOT NULL,
  value  bytea NOT NULL,
  PRIMARY KEY (pk_run, place)
);

COMMENT ON TABLE rota.workflow_value IS 'What steps returned, msgpack.';

CREATE TABLE rota.workflow_timer (
  pk_run  uuid NOT NULL,
  place   smallint NOT NULL,
  attempt integer NOT NULL,
  ts_due  timestamptz NOT NULL,
  PRIMARY KEY (pk_run, place, attempt)
) WITH (autovacuum_vacuum_scale_factor = 0.02);
CREATE INDEX ON rota.workflow_timer (ts_due);

COMMENT ON TABLE rota.workflow_timer IS 'Deleted by whoever fires it, in the transaction of what follows. place -1: of the run as a whole.';

-- What runs have to hear. Written in the transaction of what happened, deleted in that which takes it up.
CREATE TABLE rota.workflow_news (
  news_id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  kind        text NOT NULL CHECK (kind IN ('job', 'undo', 'free', 'run', 'saga', 'cancel')),
  workflow_id text NOT NULL,
  pk_show     uuid NOT NULL,
  pk_job      uuid,
  state       text,
  reason      text,
  pk_layer    uuid,
  frames      integer,
  request     bytea,
  ts_at       timestamptz NOT NULL DEFAULT now()
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);

CREATE INDEX workflow_news_sagas ON rota.workflow_news (news_id) WHERE kind IN ('undo', 'free');

COMMENT ON COLUMN rota.workflow_news.kind IS 'Of the end of a job. undo: of a compensation; free: of one that belongs to no run that goes on. Sagas hear of both.';
COMMENT ON COLUMN rota.workflow_news.workflow_id IS 'The run, or whatever else a job names as its workflow_id.';
COMMENT ON COLUMN rota.workflow_news.pk_job IS 'The job, or of kind run the run, that has ended.';

-- Every way in which a job ends leads to job_done, so none is missed; a job without a workflow_id costs one comparison.
CREATE FUNCTION rota.is_live_run(id text) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
BEGIN
  RETURN rota.is_uuid(id) AND EXISTS (
    SELECT FROM rota.workflow_run r WHERE r.pk_run = id::uuid AND r.ts_ended IS NULL AND r.state <> 'COMPENSATING');
END $$;

CREATE FUNCTION rota.workflow_hear() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO rota.workflow_news (kind, workflow_id, pk_show, pk_job, state, reason, pk_layer, frames, request, ts_at)
  VALUES (CASE WHEN EXISTS (SELECT FROM rota.saga_entry e WHERE e.pk_undo = NEW.pk_job) THEN 'undo'
               WHEN rota.is_live_run(NEW.workflow_id) THEN 'job' ELSE 'free' END,
          NEW.workflow_id, NEW.pk_show, NEW.pk_job, NEW.state, NEW.reason, NEW.layers[1].pk_layer, NEW.layers[1].frames,
          NEW.request, NEW.ts_finished);
  RETURN NULL;
END $$;

CREATE TRIGGER workflow_hear AFTER INSERT ON rota.job_done
  FOR EACH ROW WHEN (NEW.workflow_id IS NOT NULL) EXECUTE FUNCTION rota.workflow_hear();

CREATE TYPE rota.workflow_taken AS (
  pk_run uuid, pk_show uuid, pk_workflow bigint, state text, steps bytea, fence bigint, input bytea, pk_root uuid,
  depth smallint, actor text, now_ms bigint,
  kinds text[], jobs uuid[], states text[], reasons text[], layers uuid[], frames integer[], vals bytea[], vals_at text[],
  codes text[], errors text[], requests bytea[], fired smallint[], attempts integer[]
);

-- Runs that have news or a timer that is due, with all of it, and locked. What belongs to a run that somebody else is at
-- stays where it is. A timer is due by this server's clock; no other is asked.
CREATE FUNCTION rota.workflow_take(most integer) RETURNS SETOF rota.workflow_taken
LANGUAGE plpgsql AS $$
DECLARE
  news bigint[];
  due record;
  wanted uuid[];
  locked uuid[];
BEGIN
  -- What is being scanned is not handed on: the next step would have read what is kept back a moment later (ADR 20).
  news := ARRAY(SELECT n.news_id FROM rota.workflow_news n
                WHERE n.kind NOT IN ('undo', 'free') AND NOT EXISTS (SELECT FROM rota.scan s WHERE s.pk_job = n.pk_job)
                ORDER BY n.news_id LIMIT most FOR UPDATE SKIP LOCKED);
  SELECT array_agg(t.pk_run) AS runs, array_agg(t.place) AS places, array_agg(t.attempt) AS attempts INTO due
  FROM (SELECT * FROM rota.workflow_timer t WHERE t.ts_due <= clock_timestamp() ORDER BY t.ts_due LIMIT most
        FOR UPDATE SKIP LOCKED) AS t;
  IF cardinality(news) = 0 AND due.runs IS NULL THEN
    RETURN;
  END IF;

  wanted := ARRAY(
    SELECT n.workflow_id::uuid FROM rota.workflow_news n WHERE n.news_id = ANY (news) AND rota.is_uuid(n.workflow_id)
    UNION SELECT unnest(due.runs));
  locked := ARRAY(SELECT r.pk_run FROM rota.workflow_run r WHERE r.pk_run = ANY (wanted) AND r.ts_ended IS NULL
                  ORDER BY r.pk_run FOR NO KEY UPDATE SKIP LOCKED);

  RETURN QUERY
  WITH heard AS (
    DELETE FROM rota.workflow_news n
    USING rota.workflow_run r
    WHERE n.news_id = ANY (news) AND n.workflow_id = ANY (locked::text[]) AND r.pk_run = n.workflow_id::uuid
      AND (n.kind <> 'job' OR r.state <> 'COMPENSATING')
    RETURNING n.*
  ), told AS (
    SELECT h.workflow_id::uuid AS pk_run, array_agg(h.kind ORDER BY h.news_id) AS kinds,
           array_agg(h.pk_job ORDER BY h.news_id) AS jobs, array_agg(h.state ORDER BY h.news_id) AS states,
           array_agg(h.reason ORDER BY h.news_id) AS reasons, array_agg(h.pk_layer ORDER BY h.news_id) AS layers,
           array_agg(h.frames ORDER BY h.news_id) AS frames, array_agg(e.value ORDER BY h.news_id) AS vals,
           array_agg(e.value_at ORDER BY h.news_id) AS vals_at, array_agg(e.code ORDER BY h.news_id) AS codes,
           array_agg(e.error ORDER BY h.news_id) AS errors, array_agg(h.request ORDER BY h.news_id) AS requests
    FROM heard h LEFT JOIN LATERAL (
      -- The end of a job's only frame is written in the transaction of its own end, so its moment is the same one.
      SELECT CASE WHEN rota.output_readable(e.output) THEN e.value END AS value,
             CASE WHEN rota.output_readable(e.output) THEN e.value_at END AS value_at, e.code, e.error
      FROM rota.frame_end e
      WHERE h.frames = 1 AND e.pk_layer = h.pk_layer AND e.ts_finished = h.ts_at
      ORDER BY e.attempt DESC LIMIT 1
    ) AS e ON true
    GROUP BY 1
  ), fired AS (
    DELETE FROM rota.workflow_timer t
    USING unnest(due.runs, due.places, due.attempts) AS d (pk_run, place, attempt)
    WHERE t.pk_run = d.pk_run AND t.place = d.place AND t.attempt = d.attempt AND t.pk_run = ANY (locked)
    RETURNING t.pk_run, t.place, t.attempt, t.ts_due
  ), timed AS (
    SELECT f.pk_run, array_agg(f.place ORDER BY f.ts_due) AS fired, array_agg(f.attempt ORDER BY f.ts_due) AS attempts
    FROM fired f GROUP BY 1
  )
  SELECT r.pk_run, r.pk_show, r.pk_workflow, r.state, r.steps, r.fence, r.input, r.pk_root, r.depth, r.actor,
         rota.now_ms(), told.kinds, told.jobs, told.states, told.reasons, told.layers, told.frames, told.vals, told.vals_at, told.codes,
         told.errors, told.requests, timed.fired, timed.attempts
  FROM rota.workflow_run r LEFT JOIN told USING (pk_run) LEFT JOIN timed USING (pk_run)
  WHERE r.pk_run = ANY (locked) AND (told.pk_run IS NOT NULL OR timed.pk_run IS NOT NULL);

  -- Runs that have ended meanwhile hear of nothing any more; ends of jobs are left to sagas.
  UPDATE rota.workflow_news n SET kind = 'free'
  WHERE n.news_id = ANY (news) AND n.kind = 'job' AND NOT rota.is_live_run(n.workflow_id);
  DELETE FROM rota.workflow_news n
  WHERE n.news_id = ANY (news) AND n.kind <> 'job' AND NOT EXISTS (
    SELECT FROM rota.workflow_run r WHERE r.pk_run::text = n.workflow_id AND r.ts_ended IS NULL);
  DELETE FROM rota.workflow_timer t USING unnest(due.runs) AS d (pk_run)
  WHERE t.pk_run = d.pk_run AND NOT EXISTS (
    SELECT FROM rota.workflow_run r WHERE r.pk_run = d.pk_run AND r.ts_ended IS NULL);
END $$;

COMMENT ON FUNCTION rota.workflow_take IS 'Timers are deleted, news too: whoever dies before the commit has taken nothing.';

CREATE FUNCTION rota.is_uuid(given text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
  SELECT given ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
$$;

-- What an advance has decided, for many runs. Who has read another fence than the row has writes nothing at all.
CREATE FUNCTION rota.workflow_write(
  runs uuid[], fences bigint[], new_states text[], new_steps bytea[], new_outputs bytea[], new_errors text[], ended boolean[],
  told jsonb[],
  t_runs uuid[], t_places smallint[], t_attempts integer[], t_dues_ms bigint[],
  u_runs uuid[], u_places smallint[], u_attempts integer[],
  v_runs uuid[], v_places smallint[], v_values bytea[], triggers text[]
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
  written integer;
BEGIN
  UPDATE rota.workflow_run r SET
    state = g.state, steps = g.steps, output = g.output, error = g.error, fence = r.fence + 1,
    ts_ended = CASE WHEN g.over THEN clock_timestamp() END
  FROM unnest(runs, fences, new_states, new_steps, new_outputs, new_errors, ended)
    AS g (pk_run, fence, state, steps, output, error, over)
  WHERE r.pk_run = g.pk_run AND r.fence = g.fence AND r.ts_ended IS NULL;
  GET DIAGNOSTICS written = ROW_COUNT;
  IF written <> cardinality(runs) THEN
    RAISE EXCEPTION 'a run was advanced by somebody else' USING ERRCODE = 'RT001';
  END IF;

  INSERT INTO rota.workflow_event (pk_run, fence, at, told)
  SELECT g.pk_run, g.fence, clock_timestamp(), g.told FROM unnest(runs, fences, told) AS g (pk_run, fence, told)
  WHERE g.told IS NOT NULL;

  IF cardinality(u_runs) > 0 THEN
    DELETE FROM rota.workflow_timer t USING unnest(u_runs, u_places, u_attempts) AS g (pk_run, place, attempt)
    WHERE t.pk_run = g.pk_run AND t.place = g.place AND t.attempt = g.attempt;
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

  -- What a run has recorded to be undone is not wanted any more once it has succeeded.
  IF EXISTS (SELECT FROM rota.saga) THEN
    DELETE FROM rota.saga s USING unnest(runs, new_states) AS g (pk_run, state)
    WHERE g.state = 'SUCCEEDED' AND s.workflow_id = g.pk_run::text AND s.state = 'open';
  END IF;

  -- Runs that somebody waits for: their parents hear of it, and in which way they ended.
  INSERT INTO rota.workflow_news (kind, workflow_id, pk_show, pk_job, state, reason, request)
  SELECT 'run', r.pk_parent::text, r.pk_show, r.pk_run, r.state, r.error,
         (SELECT convert_to(triggers[at], 'UTF8') FROM generate_subscripts(runs, 1) AS at WHERE runs[at] = r.pk_run)
  FROM unnest(runs, ended) AS g (pk_run, over) JOIN rota.workflow_run r ON r.pk_run = g.pk_run
  WHERE g.over AND r.pk_parent IS NOT NULL;
END $$;
