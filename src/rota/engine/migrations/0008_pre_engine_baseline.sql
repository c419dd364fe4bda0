-- Jobs, layers, placement classes, workers, results and outputs. See ADR 14.

-- Placement requirements. All frames of a queue have the same class, so if the first one does not fit, none does.
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

COMMENT ON COLUMN rota.placement_class.labels IS
  'placement.*, constraint.* and node.* labels; a worker must have each of them.';

CREATE TABLE rota.queue_class (
  queue     text PRIMARY KEY,
  pk_show   uuid NOT NULL,
  pk_folder uuid NOT NULL,
  pk_dept   uuid NOT NULL,
  class_id  integer NOT NULL REFERENCES rota.placement_class,
  UNIQUE (pk_show, pk_folder, pk_dept, class_id)
);

COMMENT ON TABLE rota.queue_class IS
  'Show, folder, department and class of a queue; a show, folder or department at its cap blocks no other.';

-- Live jobs; a job that ends moves to job_done. `state` is a JobState.
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

COMMENT ON COLUMN rota.job.reason IS
  'Why the job waits: a code of rota.model.reasons. Null: it does not wait, or the queue shows the reason.';

COMMENT ON COLUMN rota.job.ends_as IS
  'Set once, when termination begins: no frame starts any more, and the remaining frames end in this state.';

COMMENT ON COLUMN rota.job.request IS 'The rest of the submission: SubmissionDetails, msgpack.';

COMMENT ON COLUMN rota.job.ts_wait_until IS
  'Deadline from max_wait: the job fails if none of its frames was dispatched by then.';

COMMENT ON COLUMN rota.job.ts_run_at IS 'The job does not run before this time: its frames are queued as deferred.';

COMMENT ON COLUMN rota.job.word IS
  'Last policy decision, by its number in rota.policy_word; null: no policy was evaluated.';

COMMENT ON COLUMN rota.job.asks IS 'Number of consecutive policy requests without a decision.';

COMMENT ON COLUMN rota.job.ts_ask_at IS 'When the policy is evaluated again.';

COMMENT ON COLUMN rota.job.history IS 'State history: [[state, milliseconds since 1970, reason], ...].';

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

COMMENT ON COLUMN rota.layer.work IS 'Work, msgpack: what each frame runs, and the resources it needs.';

COMMENT ON COLUMN rota.layer.input IS
  'Input of each frame, unless its queue entry has a payload of its own; input_at points to a large input.';

COMMENT ON COLUMN rota.layer.frame_step IS
  'Frame q in the queue, which counts by 1 from first_frame, is number first_frame + (q - first_frame) * frame_step.';

COMMENT ON COLUMN rota.layer.ranges IS
  'First, count, first, count, ... as the queue numbers frames; null: one range from first_frame on.';

COMMENT ON COLUMN rota.layer.items IS
  'Input of each frame of a map, until the job is admitted and the inputs move to the queue entries.';

COMMENT ON COLUMN rota.layer.capped IS
  'Whether the layer or its job was submitted with a cap; a cap that is set later does not change it.';

-- Ended jobs, partitioned by the day on which they ended; partitions past their retention are dropped. The default
-- partition takes rows of days without a partition.
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
  -- Maintenance moves caps of ended jobs here from job_resource and layer_resource, so that accounting does not
  -- publish them to Redis forever; a resubmission reads them. Rows that still count usage stay until it is corrected.
  caps jsonb
) PARTITION BY RANGE (ts_finished);

CREATE TABLE rota.job_done_default PARTITION OF rota.job_done DEFAULT;

CREATE INDEX ON rota.job_done (pk_job);

CREATE INDEX ON rota.job_done (pk_show, ts_finished);

CREATE INDEX ON rota.job_done (pk_show, pk_job);

COMMENT ON COLUMN rota.job_done.layers IS 'Layers of the job when it ended, in order.';

-- Results and errors of attempts, partitioned by day. Before a partition is dropped, rows of jobs that are live, or
-- kept for longer, move to a later day.
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
  -- Keeps the time of the end when the row moves to a later day.
  ts_ended timestamptz,
  -- Null: unchanged, readable by all who may see the job. Holds are set by the insert, so that no read precedes them.
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

COMMENT ON COLUMN rota.idempotency_key.digest IS
  'Digest of the submission: the same key with another digest is refused.';

-- Worker sessions: a process that starts again gets a new row.
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

COMMENT ON COLUMN rota.worker.state IS
  'gone: it deregistered; lost: its heartbeats stopped. Neither ever gets another proc.';

-- Show, folder, department and queue of a layer. Every call looks them up by name, because they may have been renamed
-- or deleted. `fault` says what is missing.
CREATE TYPE rota.job_place AS (
  pk_show uuid, pk_folder uuid, pk_dept uuid, queue text, priority smallint, fault text
);

CREATE TYPE rota.job_unwritten AS (at integer, outcome text, pk_job uuid, state text);

-- Dependencies between jobs. A job is not queued while it has a row here. The row is deleted when pk_before succeeds
-- (with if_failed = 'run': when it ends), or when pk_job itself ends.
CREATE TABLE rota.job_after (
  pk_before uuid NOT NULL,
  pk_job    uuid NOT NULL,
  if_failed text NOT NULL CHECK (if_failed IN ('cancel', 'fail', 'run')),
  PRIMARY KEY (pk_before, pk_job)
) WITH (autovacuum_vacuum_scale_factor = 0.02);

CREATE INDEX ON rota.job_after (pk_job);

COMMENT ON TABLE rota.job_after IS 'pk_job waits for pk_before, which existed first: dependencies have no cycles.';

COMMENT ON COLUMN rota.job_after.if_failed IS
  'What happens to pk_job if pk_before does not succeed; run: it runs nevertheless.';

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
  'Result of completing frames, by `what`. not_held: nothing was done, because the worker holds only `tokens`; '
  'refused: these positions had ended before; released: procs of one layer that were deleted; singles: procs of one '
  'frame each, with a job and a layer per token; finished: jobs that ended.';

-- Logs of frames, in chunks, partitioned by the day on which they were received.
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

COMMENT ON COLUMN rota.frame_log.at IS
  'Offset of the first byte in the whole stream; chunks may overlap or leave gaps.';

COMMENT ON COLUMN rota.frame_log.dropped IS
  'Number of bytes directly before this chunk that were dropped by a limit; other missing bytes were lost.';

COMMENT ON COLUMN rota.frame_log.last IS 'The stream has no more chunks after this one.';

COMMENT ON COLUMN rota.frame_end.ts_ended IS
  'When the attempt ended, if its row was moved to the partition of a later day.';

CREATE INDEX frame_end_carried ON rota.frame_end (ts_ended) WHERE ts_ended IS NOT NULL;

CREATE INDEX frame_end_failed ON rota.frame_end (pk_layer, ts_finished)
  WHERE state NOT IN ('SUCCEEDED', 'RETRIED', 'RETURNED');

-- Jobs that were live across midnight (UTC): their rows in frame_end may be in the partition of an earlier day.
CREATE INDEX job_done_overnight ON rota.job_done (ts_submitted)
  WHERE (ts_submitted AT TIME ZONE 'UTC')::date < (ts_finished AT TIME ZONE 'UTC')::date;

CREATE INDEX ON rota.worker (ts_ended) WHERE state <> 'up';

COMMENT ON COLUMN rota.job_done.caps IS
  'Caps of the job and its layers, by id: [cores, GPUs]. Rows in job_resource and layer_resource take precedence.';

COMMENT ON COLUMN rota.show.int_max_jobs IS
  'Maximum number of jobs of the show that are dispatched or running concurrently; -1: unlimited.';

CREATE TABLE rota.job_slot (
  pk_job   uuid PRIMARY KEY,
  pk_show  uuid NOT NULL,
  ts_taken timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE INDEX ON rota.job_slot (pk_show);

COMMENT ON TABLE rota.job_slot IS
  'Jobs admitted under a limit on concurrent jobs. Only rows of live jobs count; see rota.job_slots_used.';

COMMENT ON COLUMN rota.frame_end.output IS
  'held: not readable until scanned; quarantined: not readable; redacted: differs from the output of the frame.';

COMMENT ON COLUMN rota.frame_end.checks IS 'All checks of the output, in order: a list of OutputCheck.';

-- Asynchronous scans of outputs. A claim sets `ts_due` to the end of its lease and increments `tries`; a verdict is
-- accepted only while `tries` is unchanged.
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

COMMENT ON COLUMN rota.scan.meta IS 'OutputMeta, msgpack.';

COMMENT ON COLUMN rota.scan.unsettled IS
  'Number of consecutive claims without an outcome: this output may crash the scanner.';

COMMENT ON COLUMN rota.scan.ts_ended IS
  'When the frame ended; its row in frame_end is in the partition of this day or of a later one.';

-- Outputs that were withheld or redacted, for reviewers.
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

COMMENT ON COLUMN rota.output.original IS
  'Of a redacted output: one "POINTER PART" for each part of the original; PART is value or artifact:NAME.';
