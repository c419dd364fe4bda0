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
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02);

  -- room for the next state in the same page

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
  kind        text NOT NULL CHECK (kind IN ('job', 'undo', 'free', 'run', 'saga', 'cancel', 'approval')),
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

CREATE TYPE rota.workflow_taken AS (
  pk_run uuid, pk_show uuid, pk_workflow bigint, state text, fence bigint, pk_root uuid, depth smallint, actor text,
  now_ms bigint, steps bytea, input bytea,
  news_id bigint, kind text, pk_job uuid, ended_as text, reason text, pk_layer uuid, frames integer, value bytea, value_at text, code text,
  error text, request bytea, place smallint, attempt integer
);

COMMENT ON TYPE rota.workflow_taken IS
  'One thing that a run has to hear; those of a run follow each other, and the first has its steps and input. Of kind timer: place and attempt.';

CREATE TABLE rota.saga (
  pk_saga     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  pk_show     uuid NOT NULL,
  workflow_id text NOT NULL,
  state       text NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'rolling_back', 'rolled_back', 'incomplete')),
  reason      text,
  ts_opened   timestamptz NOT NULL DEFAULT now(),
  ts_began    timestamptz,
  ts_ended    timestamptz,
  UNIQUE (pk_show, workflow_id),
  fence bigint NOT NULL DEFAULT 0
);

CREATE INDEX saga_rolling_back ON rota.saga (pk_saga) WHERE state = 'rolling_back';

CREATE INDEX saga_open ON rota.saga (workflow_id) WHERE state = 'open';

COMMENT ON COLUMN rota.saga.workflow_id IS 'A run, or what jobs outside of any workflow name as theirs.';

COMMENT ON COLUMN rota.saga.state IS 'incomplete: rolled back, and some of it failed, was skipped or could not be read.';

CREATE TABLE rota.saga_entry (
  pk_saga     bigint NOT NULL REFERENCES rota.saga ON DELETE CASCADE,
  number      bigint GENERATED ALWAYS AS IDENTITY,
  pk_job      uuid NOT NULL,
  step        text NOT NULL DEFAULT '',
  template    bytea NOT NULL,
  state       text NOT NULL DEFAULT 'pending'
              CHECK (state IN ('pending', 'running', 'done', 'failed', 'skipped', 'corrupt')),
  attempt     integer NOT NULL DEFAULT 1,
  pk_undo     uuid,
  error       text,
  ts_changed  timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (pk_saga, number)
);

CREATE UNIQUE INDEX ON rota.saga_entry (pk_job);

CREATE INDEX ON rota.saga_entry (pk_undo) WHERE pk_undo IS NOT NULL;

COMMENT ON COLUMN rota.saga_entry.pk_job IS 'The job that it undoes. Once: however often its end is heard of.';

COMMENT ON COLUMN rota.saga_entry.template IS 'rota.model.job.Submission, msgpack: what is submitted to undo it.';

COMMENT ON COLUMN rota.workflow_news.pk_job IS 'The job, of kind run the run, that has ended; of kind approval what was decided.';

COMMENT ON COLUMN rota.workflow_news.request IS 'Of a job what was submitted; of a run how it failed; of an approval the output of its step.';

COMMENT ON COLUMN rota.saga.fence IS 'Rises with every change of the saga or its entries: what Redis is told names it.';

-- What ended long ago is found by when it did.
CREATE INDEX ON rota.workflow_run (ts_ended) WHERE ts_ended IS NOT NULL;

CREATE INDEX ON rota.saga (ts_ended) WHERE ts_ended IS NOT NULL;
