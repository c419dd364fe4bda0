-- Jobs, their layers, where they may run, and what is left of them. See docs/adr/0014-the-pipeline.md.

-- What placement looks at. Frames of a queue are alike in all of it, so the first that does not fit speaks for the rest.
CREATE TABLE rota.placement_class (
  class_id         integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  digest           bytea NOT NULL UNIQUE,
  topic            text NOT NULL,
  requires         text[] NOT NULL DEFAULT '{}',
  labels           jsonb NOT NULL DEFAULT '{}',
  preferred_pool   text,
  preferred_worker text,
  cores            bigint NOT NULL,
  gpus             integer NOT NULL,
  memory_mb        bigint NOT NULL
);

COMMENT ON COLUMN rota.placement_class.labels IS 'placement.*, constraint.* and node.* labels; a worker must have each.';

CREATE TABLE rota.queue_class (
  queue     text PRIMARY KEY,
  pk_show   uuid NOT NULL,
  pk_folder uuid NOT NULL,
  pk_dept   uuid NOT NULL,
  class_id  integer NOT NULL REFERENCES rota.placement_class,
  UNIQUE (pk_show, pk_folder, pk_dept, class_id)
);

COMMENT ON TABLE rota.queue_class IS 'What the name of a queue stands for; a show, folder or department at its cap stops no other.';

-- Live jobs only: one that has ended moves to job_done. `state` is a word of rota.model.lifecycle.JobState.
CREATE TABLE rota.job (
  pk_job            uuid PRIMARY KEY,
  pk_show           uuid NOT NULL,
  pk_folder         uuid NOT NULL,
  pk_dept           uuid NOT NULL,
  str_name          text NOT NULL,
  topic             text NOT NULL,
  priority          smallint NOT NULL CHECK (priority BETWEEN 1 AND 9),
  state             text NOT NULL,
  reason            text,
  int_layers        smallint NOT NULL DEFAULT 1,
  dispatch_failures smallint NOT NULL DEFAULT 0,
  ends_as           text,
  labels            jsonb,
  request           bytea,
  workflow_id       text,
  ts_submitted      timestamptz NOT NULL DEFAULT now(),
  ts_updated        timestamptz NOT NULL DEFAULT now(),
  ts_deadline       timestamptz,
  ts_wait_until     timestamptz,
  ts_run_at         timestamptz,
  history           jsonb NOT NULL DEFAULT '[]',
  word              integer,
  asks              smallint,
  ts_ask_at         timestamptz
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02);

CREATE INDEX ON rota.job (pk_job) WHERE ends_as IS NOT NULL;

CREATE INDEX ON rota.job (ts_deadline) WHERE ts_deadline IS NOT NULL;

CREATE INDEX ON rota.job (ts_wait_until) WHERE ts_wait_until IS NOT NULL;

CREATE INDEX ON rota.job (ts_ask_at) WHERE ts_ask_at IS NOT NULL;

CREATE INDEX ON rota.job (state, ts_updated) WHERE state IN ('PENDING', 'APPROVAL_REQUIRED');

CREATE INDEX ON rota.job (pk_show) WHERE reason = 'tenant_limit';

CREATE INDEX ON rota.job (pk_show, pk_job);

COMMENT ON COLUMN rota.job.reason IS 'Why it waits, in a code of rota.model.reasons; null when it does not, or the queue tells.';

COMMENT ON COLUMN rota.job.ends_as IS 'It is being ended: no frame of it starts any more, and those left end in this way. Set once.';

COMMENT ON COLUMN rota.job.request IS 'The rest of the submission, msgpack: rota.model.job.Details.';

COMMENT ON COLUMN rota.job.ts_wait_until IS 'max_wait: fails when no frame of it was dispatched until then.';

COMMENT ON COLUMN rota.job.ts_run_at IS 'Not before this moment: its frames are queued as deferred.';

COMMENT ON COLUMN rota.job.word IS 'What the policy said of it last, by its number in rota.policy_word; null: nobody was asked.';

COMMENT ON COLUMN rota.job.asks IS 'How often in a row the policy was asked and said nothing.';

COMMENT ON COLUMN rota.job.ts_ask_at IS 'When the policy is to be asked again.';

COMMENT ON COLUMN rota.job.history IS 'Its states: [[state, milliseconds since 1970, reason], ...].';

CREATE TABLE rota.layer (
  pk_layer    uuid PRIMARY KEY,
  pk_job      uuid NOT NULL,
  number      smallint NOT NULL,
  str_name    text NOT NULL,
  queue       text NOT NULL,
  work        bytea NOT NULL,
  input       bytea,
  input_at    text,
  first_frame integer NOT NULL DEFAULT 0,
  frame_step  integer NOT NULL DEFAULT 1 CHECK (frame_step > 0),
  ranges      integer[],
  items       bytea[],
  capped      boolean NOT NULL DEFAULT false,
  frames      integer NOT NULL CHECK (frames > 0),
  succeeded   integer NOT NULL DEFAULT 0,
  quarantined integer NOT NULL DEFAULT 0,
  failed      integer NOT NULL DEFAULT 0,
  timed_out   integer NOT NULL DEFAULT 0,
  cancelled   integer NOT NULL DEFAULT 0,
  denied      integer NOT NULL DEFAULT 0,
  took_ms     bigint NOT NULL DEFAULT 0,
  CHECK (succeeded + quarantined + failed + timed_out + cancelled + denied <= frames)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02);

CREATE INDEX ON rota.layer (pk_job);

COMMENT ON COLUMN rota.layer.work IS 'rota.model.work.Work, msgpack: what each frame runs and asks for.';

COMMENT ON COLUMN rota.layer.input IS 'What each frame is called with, unless its queue entry brings its own; input_at is where a large one is.';

COMMENT ON COLUMN rota.layer.frame_step IS
  'The queue numbers frames one by one from first_frame on; frame q of the queue is number first_frame + (q - first_frame) * frame_step.';

COMMENT ON COLUMN rota.layer.ranges IS 'First, count, first, count, ... as the queue numbers them; null: one range from first_frame on.';

COMMENT ON COLUMN rota.layer.items IS 'What each frame of a map is called with, until the job is admitted and they go to the queue.';

COMMENT ON COLUMN rota.layer.capped IS 'Whether it or its job was submitted with a cap; one that was set later is not told here.';

-- What has ended, by the day it ended; days past their retention are dropped whole. The default takes what no day does.
CREATE TABLE rota.job_done (
  pk_job       uuid NOT NULL,
  pk_show      uuid NOT NULL,
  pk_folder    uuid NOT NULL,
  pk_dept      uuid NOT NULL,
  str_name     text NOT NULL,
  topic        text NOT NULL,
  priority     smallint NOT NULL,
  state        text NOT NULL,
  reason       text,
  labels       jsonb,
  request      bytea,
  workflow_id  text,
  ts_submitted timestamptz NOT NULL,
  ts_deadline  timestamptz,
  ts_finished  timestamptz NOT NULL,
  history      jsonb NOT NULL,
  layers       rota.layer[] NOT NULL,
  word         integer,
  -- Caps of jobs that have ended, of which nothing is booked: kept with the job for whoever retries it, and removed from the
  -- books, lest every job there ever was is told to Redis again and again. Nothing is booked for a job that has ended; a row
  -- that counts something all the same stays, under the lock that counting takes, until the books have set it right.
  caps jsonb
) PARTITION BY RANGE (ts_finished);

CREATE TABLE rota.job_done_default PARTITION OF rota.job_done DEFAULT;

CREATE INDEX ON rota.job_done (pk_job);

CREATE INDEX ON rota.job_done (pk_show, ts_finished);

CREATE INDEX ON rota.job_done (pk_show, pk_job);

COMMENT ON COLUMN rota.job_done.layers IS 'Its layers as they were when it ended, in order.';

-- What frames returned, and why they failed. By the day they ended; what belongs to a live job is carried on when a day goes.
CREATE TABLE rota.frame_end (
  pk_layer    uuid NOT NULL,
  frame       integer NOT NULL,
  attempt     smallint NOT NULL,
  token       bigint NOT NULL,
  state       text NOT NULL,
  value       bytea,
  value_at    text,
  code        text,
  error       text,
  took_ms     integer NOT NULL DEFAULT 0,
  pk_host     uuid,
  artifacts   text[],
  ts_finished timestamptz NOT NULL DEFAULT now(),
  -- Carried on to a later day, a row still says when its frame ended.
  ts_ended timestamptz,
  -- Null: as it was, for everybody who may see the job. The row that ends a frame says so from the first moment on.
  output text CHECK (output IN ('held', 'quarantined', 'redacted')),
  checks jsonb
) PARTITION BY RANGE (ts_finished);

CREATE TABLE rota.frame_end_default PARTITION OF rota.frame_end DEFAULT;

CREATE INDEX ON rota.frame_end (pk_layer, frame);

CREATE TABLE rota.idempotency_key (
  pk_show    uuid NOT NULL,
  key        text NOT NULL CHECK (length(key) BETWEEN 1 AND 200),
  pk_job     uuid NOT NULL,
  digest     bytea NOT NULL,
  ts_created timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (pk_show, key)
);

CREATE INDEX ON rota.idempotency_key (ts_created);

COMMENT ON COLUMN rota.idempotency_key.digest IS 'Of the submission: the same key with another one is refused.';

-- Workers by incarnation: a process that starts again is another one.
CREATE TABLE rota.worker (
  pk_host      uuid PRIMARY KEY,
  str_name     text NOT NULL,
  pool         text NOT NULL,
  pk_alloc     uuid NOT NULL,
  state        text NOT NULL DEFAULT 'up' CHECK (state IN ('up', 'gone', 'lost')),
  hello        bytea NOT NULL,
  ts_up        timestamptz NOT NULL DEFAULT now(),
  ts_ended     timestamptz
);

CREATE INDEX ON rota.worker (state) WHERE state = 'up';

COMMENT ON COLUMN rota.worker.state IS 'gone: it said goodbye; lost: it fell silent. Neither ever has a proc again.';

-- Where the frames of a layer go, by names: looked up in every call, so that nothing that was renamed or deleted since is
-- believed. `fault` says what is missing.
CREATE TYPE rota.job_place AS (
  pk_show uuid, pk_folder uuid, pk_dept uuid, queue text, priority smallint, fault text
);

CREATE TYPE rota.job_unwritten AS (at integer, outcome text, pk_job uuid, state text);

-- Jobs that wait for others. An edge is there until the job it names has ended; while a job has one it is not queued.
CREATE TABLE rota.job_after (
  pk_before uuid NOT NULL,
  pk_job    uuid NOT NULL,
  if_failed text NOT NULL CHECK (if_failed IN ('cancel', 'fail', 'run')),
  PRIMARY KEY (pk_before, pk_job)
) WITH (autovacuum_vacuum_scale_factor = 0.02);

CREATE INDEX ON rota.job_after (pk_job);

COMMENT ON TABLE rota.job_after IS 'pk_job waits for pk_before, which was there before it: nothing can ever wait for itself.';

COMMENT ON COLUMN rota.job_after.if_failed IS 'What becomes of it when pk_before does not succeed; run: nothing.';

CREATE TYPE rota.job_ended AS (pk_job uuid, pk_show uuid, topic text, state text, workflow_id text);

CREATE TYPE rota.proc_freed AS (
  managed boolean, fence bigint, pk_alloc uuid, pk_folder uuid, pk_job uuid, pk_layer uuid, pk_dept uuid,
  cores bigint, gpus bigint, tokens bigint[]
);

CREATE TYPE rota.frame_told AS (
  what text, claim_id bigint, refused varbit,
  pk_show uuid, managed boolean, fence bigint,
  pk_alloc uuid, pk_folder uuid, pk_dept uuid, cores bigint, gpus bigint, jobs uuid[], layers uuid[], tokens bigint[],
  topic text, state text, workflow_id text
);

COMMENT ON TYPE rota.frame_told IS
  'What came of ending frames. not_held: nothing was done, since the worker holds only `tokens`; refused: these had ended before;
released: procs of one layer that are gone; singles: those of one frame each, a job and a layer for each token; finished: jobs that have ended.';

-- What a frame wrote, in pieces, by the day they came in.
CREATE TABLE rota.frame_log (
  pk_layer   uuid NOT NULL,
  frame      integer NOT NULL,
  attempt    smallint NOT NULL,
  token      bigint NOT NULL,
  stream     text NOT NULL CHECK (stream IN ('stdout', 'stderr', 'log')),
  at         bigint NOT NULL CHECK (at >= 0),
  dropped    bigint NOT NULL DEFAULT 0,
  data       bytea NOT NULL,
  last       boolean NOT NULL DEFAULT false,
  ts_written timestamptz NOT NULL DEFAULT now()
) PARTITION BY RANGE (ts_written);

CREATE TABLE rota.frame_log_default PARTITION OF rota.frame_log DEFAULT;

CREATE INDEX ON rota.frame_log (pk_layer, frame, token);

COMMENT ON COLUMN rota.frame_log.at IS 'Place of its first byte among all that the stream ever wrote; pieces may overlap or leave gaps.';

COMMENT ON COLUMN rota.frame_log.dropped IS 'So many bytes right before it were too many to be kept; what else is missing there got lost.';

COMMENT ON COLUMN rota.frame_log.last IS 'Nothing follows in this stream.';

COMMENT ON COLUMN rota.frame_end.ts_ended IS 'When the attempt ended, if its row was carried on to a later day than that.';

CREATE INDEX frame_end_carried ON rota.frame_end (ts_ended) WHERE ts_ended IS NOT NULL;

CREATE INDEX frame_end_failed ON rota.frame_end (pk_layer, ts_finished) WHERE state NOT IN ('SUCCEEDED', 'RETRIED', 'RETURNED');

-- Jobs that lived across a midnight: what belongs to them may lie in an older day than they do.
CREATE INDEX job_done_overnight ON rota.job_done (ts_submitted)
  WHERE (ts_submitted AT TIME ZONE 'UTC')::date < (ts_finished AT TIME ZONE 'UTC')::date;

CREATE INDEX ON rota.worker (ts_ended) WHERE state <> 'up';

COMMENT ON COLUMN rota.job_done.caps IS 'Its caps and those of its layers, by id: [cores, GPUs]. While it has rows in the books these hold.';

COMMENT ON COLUMN rota.show.int_max_jobs IS 'Jobs of it that are dispatched or running at a time; -1: as many as there are.';

CREATE TABLE rota.job_slot (
  pk_job   uuid PRIMARY KEY,
  pk_show  uuid NOT NULL,
  ts_taken timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE INDEX ON rota.job_slot (pk_show);

COMMENT ON TABLE rota.job_slot IS 'Jobs that were let in under a limit of their show. One counts for as long as its job lives; see job_slots_used.';

COMMENT ON COLUMN rota.frame_end.output IS 'held: nobody reads it before it was scanned; quarantined; redacted: it is not as the frame left it.';

COMMENT ON COLUMN rota.frame_end.checks IS 'Every look at it, in order: rota.model.output.Check.';

-- Whoever claims a row moves `ts_due` to the end of its lease and counts `tries`: a verdict counts under that number only.
CREATE TABLE rota.scan (
  token     bigint PRIMARY KEY,
  pk_layer  uuid NOT NULL,
  frame     integer NOT NULL,
  pk_job    uuid NOT NULL,
  pk_show   uuid NOT NULL,
  mode      text NOT NULL CHECK (mode IN ('pass', 'hold', 'fail_closed')),
  budget_s  real NOT NULL,
  meta      bytea NOT NULL,
  tries     integer NOT NULL DEFAULT 0,
  unsettled integer NOT NULL DEFAULT 0,
  ts_ended  timestamptz NOT NULL DEFAULT now(),
  ts_due    timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02);

CREATE INDEX ON rota.scan (ts_due);

CREATE INDEX ON rota.scan (pk_job);

COMMENT ON COLUMN rota.scan.meta IS 'rota.model.output.OutputMeta, msgpack.';

COMMENT ON COLUMN rota.scan.unsettled IS 'Claims in a row of which nothing was heard: whoever looks at it may die of it.';

COMMENT ON COLUMN rota.scan.ts_ended IS 'When its frame ended: the end of a frame lies in this day or a later one.';

-- Outputs that were kept back or redacted, for those who decide about them.
CREATE TABLE rota.output (
  token      bigint PRIMARY KEY,
  pk_layer   uuid NOT NULL,
  frame      integer NOT NULL,
  pk_job     uuid NOT NULL,
  pk_show    uuid NOT NULL,
  state      text NOT NULL CHECK (state IN ('quarantined', 'redacted', 'released')),
  severity   text NOT NULL,
  rule       text NOT NULL DEFAULT '',
  reason     text NOT NULL DEFAULT '',
  meta       bytea NOT NULL,
  original   text[],
  ts_ended   timestamptz NOT NULL,
  ts_decided timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE INDEX ON rota.output (pk_show, token);

CREATE INDEX ON rota.output (pk_job);

CREATE INDEX ON rota.output (ts_decided);

COMMENT ON COLUMN rota.output.original IS 'Of a redacted one: pointers to what the frame left, as words; the value is called value, a file artifact:NAME.';
