-- Workflows: definitions, runs, timers, sagas, and the inbox (workflow_news) of runs. See ADR 21.
-- Lock order: inbox rows and timers (SKIP LOCKED), runs by id, then the locks of a submission.

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

COMMENT ON TABLE rota.workflow IS
  'Every version of every definition. A version never changes, so a run keeps its definition.';

COMMENT ON COLUMN rota.workflow.spec IS 'WorkflowSpec, JSON; digest is the SHA-256 of these bytes.';

-- The fillfactor leaves room for the next state in the same page (HOT updates).
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

CREATE INDEX ON rota.workflow_run (pk_show, pk_run);

CREATE INDEX ON rota.workflow_run (pk_workflow);

CREATE INDEX ON rota.workflow_run (pk_run) WHERE ts_ended IS NULL;

CREATE UNIQUE INDEX workflow_run_key ON rota.workflow_run (pk_show, key) WHERE key IS NOT NULL;

COMMENT ON COLUMN rota.workflow_run.steps IS 'RunStatus, msgpack: the state of each step.';

COMMENT ON COLUMN rota.workflow_run.fence IS 'Increases with every advance; a writer must name the value that it read.';

COMMENT ON COLUMN rota.workflow_run.pk_parent IS
  'Run whose step started this one; null: none. pk_root is the outermost run, or the run itself.';

CREATE TABLE rota.workflow_event (
  pk_run uuid NOT NULL,
  fence  bigint NOT NULL,
  at     timestamptz NOT NULL,
  told   jsonb NOT NULL,
  PRIMARY KEY (pk_run, fence)
);

COMMENT ON TABLE rota.workflow_event IS 'History of a run: at most one row per advance; rows are never updated.';

CREATE TABLE rota.workflow_value (
  pk_run uuid NOT NULL,
  place  smallint NOT NULL,
  value  bytea NOT NULL,
  PRIMARY KEY (pk_run, place)
);

COMMENT ON TABLE rota.workflow_value IS 'Results of steps, msgpack.';

CREATE TABLE rota.workflow_timer (
  pk_run  uuid NOT NULL,
  place   smallint NOT NULL,
  attempt integer NOT NULL,
  ts_due  timestamptz NOT NULL,
  PRIMARY KEY (pk_run, place, attempt)
) WITH (autovacuum_vacuum_scale_factor = 0.02);

CREATE INDEX ON rota.workflow_timer (ts_due);

COMMENT ON TABLE rota.workflow_timer IS
  'A timer is deleted when it fires, in the transaction that advances its run. place -1: timer of the whole run.';

-- The inbox of runs. A message is inserted in the transaction of its cause and deleted in the one that processes it.
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

COMMENT ON COLUMN rota.workflow_news.kind IS
  'job, undo and free: the end of a job; undo: of a compensation; free: of a job without an active run (sagas '
  'process both). run: the end of a child run.';

COMMENT ON COLUMN rota.workflow_news.workflow_id IS
  'Id of a run, or any other workflow_id that a job was submitted with.';

COMMENT ON COLUMN rota.workflow_news.pk_job IS
  'The job that ended; of kind run: the child run; of kind approval: the approval.';

CREATE TYPE rota.workflow_taken AS (
  pk_run uuid, pk_show uuid, pk_workflow bigint, state text, fence bigint, pk_root uuid, depth smallint, actor text,
  now_ms bigint, steps bytea, input bytea,
  news_id bigint, kind text, pk_job uuid, ended_as text, reason text, pk_layer uuid, frames integer,
  value bytea, value_at text, code text, error text, request bytea, place smallint, attempt integer
);

COMMENT ON TYPE rota.workflow_taken IS
  'An inbox message or a due timer of a run. Rows of a run are consecutive; only the first has steps and input. '
  'Kind timer has place and attempt.';

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

COMMENT ON COLUMN rota.saga.workflow_id IS 'Id of a run, or the workflow_id of jobs that belong to no run.';

COMMENT ON COLUMN rota.saga.state IS
  'incomplete: rolled back, but some compensations failed, were skipped or could not be decoded.';

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

COMMENT ON COLUMN rota.saga_entry.pk_job IS
  'The job that the entry compensates. Unique, so that a redelivered end of the job adds no second entry.';

COMMENT ON COLUMN rota.saga_entry.template IS 'Submission of the compensation, msgpack.';

COMMENT ON COLUMN rota.workflow_news.pk_job IS
  'The job that ended; of kind run: the child run; of kind approval: the approval.';

COMMENT ON COLUMN rota.workflow_news.request IS
  'Of a job: its request; of a run: how it failed; of an approval: the output of its step.';

COMMENT ON COLUMN rota.saga.fence IS
  'Increases with every change of the saga or its entries; copies in Redis carry it.';

-- For retention: ended runs and sagas by the time of their end.
CREATE INDEX ON rota.workflow_run (ts_ended) WHERE ts_ended IS NOT NULL;

CREATE INDEX ON rota.saga (ts_ended) WHERE ts_ended IS NOT NULL;
