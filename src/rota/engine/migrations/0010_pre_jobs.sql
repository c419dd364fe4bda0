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
  word         integer
) PARTITION BY RANGE (ts_finished);

CREATE TABLE rota.job_done_default PARTITION OF rota.job_done DEFAULT;
CREATE INDEX ON rota.job_done (pk_job);
CREATE INDEX ON rota.job_done (pk_show, ts_finished);
CREATE INDEX ON rota.job_done (pk_show, pk_job);

COMMENT ON COLUMN rota.job_done.layers IS 'Its layers as they were when it ended, in order.';

-- The newest `most` jobs before `before`, live and done, of these shows (null: of all), by an index in either case.
CREATE FUNCTION rota.jobs_before(shows uuid[], before uuid, most integer) RETURNS TABLE (
  pk_job uuid, pk_show uuid, str_name text, topic text, priority smallint, state text, reason text, labels jsonb,
  ts_submitted timestamptz, ts_finished timestamptz, layers rota.layer[]
) LANGUAGE plpgsql STABLE AS $$
DECLARE
  latest uuid := coalesce(before, 'ffffffff-ffff-ffff-ffff-ffffffffffff');
BEGIN
  IF shows IS NULL THEN
    RETURN QUERY
    (SELECT j.pk_job, j.pk_show, j.str_name, j.topic, j.priority, j.state, j.reason, j.labels, j.ts_submitted,
            NULL::timestamptz, NULL::rota.layer[]
     FROM rota.job j WHERE j.pk_job < latest ORDER BY j.pk_job DESC LIMIT most)
    UNION ALL
    (SELECT d.pk_job, d.pk_show, d.str_name, d.topic, d.priority, d.state, d.reason, d.labels, d.ts_submitted,
            d.ts_finished, d.layers
     FROM rota.job_done d WHERE d.pk_job < latest ORDER BY d.pk_job DESC LIMIT most)
    ORDER BY 1 DESC LIMIT most;
  ELSE
    RETURN QUERY
    SELECT f.* FROM unnest(shows) AS s (pk_show) CROSS JOIN LATERAL (
      (SELECT j.pk_job, j.pk_show, j.str_name, j.topic, j.priority, j.state, j.reason, j.labels, j.ts_submitted,
              NULL::timestamptz, NULL::rota.layer[]
       FROM rota.job j WHERE j.pk_show = s.pk_show AND j.pk_job < latest ORDER BY j.pk_job DESC LIMIT most)
      UNION ALL
      (SELECT d.pk_job, d.pk_show, d.str_name, d.topic, d.priority, d.state, d.reason, d.labels, d.ts_submitted,
              d.ts_finished, d.layers
       FROM rota.job_done d WHERE d.pk_show = s.pk_show AND d.pk_job < latest ORDER BY d.pk_job DESC LIMIT most)
    ) AS f ORDER BY 1 DESC LIMIT most;
  END IF;
END $$;

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
  ts_finished timestamptz NOT NULL DEFAULT now()
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
