-- Where frames wait and end: storage and counts. See docs/adr/0013-the-queue.md.
-- A turn is one attempt's place in a lane, (lane_id, lane_seq). A claim covers up to 512 consecutive turns, and the
-- token of a claimed turn is claim_id * 512 + its offset in the claim, which stays below 2^53 for 2^41 claims.

CREATE TABLE rota.queues (
  queue          text PRIMARY KEY CHECK (length(queue) BETWEEN 1 AND 200),
  enqueue_shards smallint NOT NULL DEFAULT 4 CHECK (enqueue_shards BETWEEN 1 AND 64),
  paused         boolean NOT NULL DEFAULT false,
  dlq_on_fail    boolean NOT NULL DEFAULT false,
  created_at     timestamptz NOT NULL DEFAULT now()
);

COMMENT ON COLUMN rota.queues.enqueue_shards IS
  'Producers that would wait for each other take the next shard; 1 is strict order, and they wait.';

CREATE TABLE rota.queue_lanes (
  lane_id       integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  queue         text NOT NULL REFERENCES rota.queues,
  priority      smallint NOT NULL CHECK (priority BETWEEN 1 AND 9),
  enqueue_shard smallint NOT NULL CHECK (enqueue_shard >= 0),
  UNIQUE (queue, priority, enqueue_shard)
);

-- One row. The mode is a choice of the operator; trust is lost when counters were not kept for a while.
CREATE TABLE rota.queue_storage (
  one              boolean PRIMARY KEY DEFAULT true CHECK (one),
  counter_mode     text NOT NULL DEFAULT 'ledger' CHECK (counter_mode IN ('ledger', 'upsert', 'scan')),
  counter_stripes  smallint NOT NULL DEFAULT 1 CHECK (counter_stripes BETWEEN 1 AND 256),
  counters_trusted boolean NOT NULL DEFAULT true
);

INSERT INTO rota.queue_storage DEFAULT VALUES;

-- The ring: slots 0 to 6 in turn, slot = generation mod 7. Slot 7 keeps what outlives its slot.
CREATE TABLE rota.queue_ring_rotations (
  generation bigint PRIMARY KEY,
  rotated_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

INSERT INTO rota.queue_ring_rotations (generation) VALUES (7);

CREATE TABLE rota.ready_entries (
  ready_slot  smallint NOT NULL,
  lane_id     integer NOT NULL,
  lane_seq    bigint NOT NULL,
  n           integer NOT NULL CHECK (n > 0),
  job_id      uuid NOT NULL,
  layer_id    uuid NOT NULL,
  frame       integer NOT NULL,
  attempt     smallint NOT NULL,
  payload     bytea,
  enqueued_at timestamptz NOT NULL DEFAULT now()
) PARTITION BY LIST (ready_slot);

COMMENT ON TABLE rota.ready_entries IS 'Turns lane_seq to lane_seq + n - 1, for frames frame to frame + n - 1 of a layer.';

CREATE TABLE rota.queue_claims (
  ready_slot smallint NOT NULL,
  claim_id   bigint NOT NULL,
  lane_id    integer NOT NULL,
  last_seq   bigint NOT NULL,
  n          smallint NOT NULL CHECK (n BETWEEN 0 AND 512),
  owner      bigint NOT NULL,
  claimed_at timestamptz NOT NULL DEFAULT now()
) PARTITION BY LIST (ready_slot);

COMMENT ON TABLE rota.queue_claims IS
  'Turns last_seq - n + 1 to last_seq were handed out; the largest last_seq of a lane is how far it was claimed.';

COMMENT ON COLUMN rota.queue_claims.n IS '0: nothing was handed out, the lane only moved on.';

CREATE TABLE rota.queue_closures (
  ready_slot   smallint NOT NULL,
  claim_id     bigint NOT NULL,
  outcome      smallint NOT NULL,
  n            smallint NOT NULL CHECK (n > 0),
  bits         varbit NOT NULL,
  finalized_at timestamptz NOT NULL DEFAULT now()
) PARTITION BY LIST (ready_slot);

COMMENT ON COLUMN rota.queue_closures.outcome IS
  '0 skipped (cancelled while waiting), 1 completed, 2 failed, 3 cancelled, 4 retried or deferred, 5 given back.';

DO $$
BEGIN
  FOR slot IN 0..7 LOOP
    EXECUTE format(
      'CREATE TABLE rota.ready_entries_%1$s PARTITION OF rota.ready_entries (PRIMARY KEY (lane_id, lane_seq))'
      ' FOR VALUES IN (%1$s) WITH (autovacuum_enabled = %2$s)', slot, slot = 7);
    EXECUTE format('CREATE INDEX ON rota.ready_entries_%s (job_id)', slot);
    EXECUTE format('ALTER TABLE rota.ready_entries_%s ALTER COLUMN payload SET STORAGE EXTERNAL', slot);
    EXECUTE format(
      'CREATE TABLE rota.queue_claims_%1$s PARTITION OF rota.queue_claims (PRIMARY KEY (claim_id))'
      ' FOR VALUES IN (%1$s) WITH (autovacuum_enabled = %2$s)', slot, slot = 7);
    EXECUTE format('CREATE INDEX ON rota.queue_claims_%s (lane_id, last_seq)', slot);
    EXECUTE format(
      'CREATE TABLE rota.queue_closures_%1$s PARTITION OF rota.queue_closures'
      ' FOR VALUES IN (%1$s) WITH (autovacuum_enabled = %2$s)', slot, slot = 7);
    EXECUTE format('CREATE INDEX ON rota.queue_closures_%s (claim_id)', slot);
  END LOOP;
END $$;

CREATE SEQUENCE rota.queue_claim_ids;

-- How far a lane was filled and claimed when the slots that showed it were pruned.
CREATE TABLE rota.queue_lane_bases (
  lane_id  integer PRIMARY KEY,
  next_seq bigint NOT NULL,
  cursor   bigint NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE rota.ready_tombstones (
  lane_id    integer NOT NULL,
  first_seq  bigint NOT NULL,
  n          integer NOT NULL CHECK (n > 0),
  ready_slot smallint NOT NULL,
  PRIMARY KEY (lane_id, first_seq)
);

CREATE INDEX ON rota.ready_tombstones (ready_slot);

COMMENT ON TABLE rota.ready_tombstones IS 'Turns that were cancelled before they were claimed; ranges never overlap.';

-- Small and short-lived, so rows are updated and deleted here.
CREATE TABLE rota.queue_returned (
  lane_id     integer NOT NULL,
  first_seq   bigint NOT NULL,
  n           integer NOT NULL CHECK (n > 0),
  ready_slot  smallint NOT NULL,
  parked_job  uuid,
  returned_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (lane_id, first_seq)
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);

CREATE INDEX ON rota.queue_returned (parked_job) WHERE parked_job IS NOT NULL;

CREATE INDEX ON rota.queue_returned (lane_id, first_seq) WHERE parked_job IS NULL;

CREATE INDEX ON rota.queue_returned (ready_slot);

COMMENT ON TABLE rota.queue_returned IS 'Turns behind the cursor that wait again; they are claimed before the lane.';

COMMENT ON COLUMN rota.queue_returned.parked_job IS 'The job is at its own cap: not claimed until it is unparked.';

CREATE TABLE rota.queue_owners (
  owner      bigint PRIMARY KEY,
  lease      text NOT NULL,
  dead       boolean NOT NULL DEFAULT false,
  started_at timestamptz NOT NULL DEFAULT now()
);

COMMENT ON TABLE rota.queue_owners IS
  'Dispatchers by the fence of their lease; a row goes when nothing is left that only a dead dispatcher would book.';

CREATE TABLE rota.deferred_jobs (
  deferred_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  run_at      timestamptz NOT NULL,
  lane_id     integer NOT NULL,
  n           integer NOT NULL CHECK (n > 0),
  job_id      uuid NOT NULL,
  layer_id    uuid NOT NULL,
  frame       integer NOT NULL,
  attempt     smallint NOT NULL,
  payload     bytea
) WITH (fillfactor = 90, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

CREATE INDEX ON rota.deferred_jobs (run_at);

CREATE INDEX ON rota.deferred_jobs (job_id);

-- Failed frames, written once and kept for the retention; the slot of their turn may be pruned meanwhile.
CREATE TABLE rota.done_entries (
  token     bigint PRIMARY KEY,
  lane_id   integer NOT NULL,
  job_id    uuid NOT NULL,
  layer_id  uuid NOT NULL,
  frame     integer NOT NULL,
  attempt   smallint NOT NULL,
  payload   bytea,
  reason    text NOT NULL,
  error     text,
  failed_at timestamptz NOT NULL DEFAULT now()
);

CREATE INDEX ON rota.done_entries (failed_at);

CREATE INDEX ON rota.done_entries (job_id);

-- One table of dead letters for all of Rota.
CREATE TABLE rota.dlq_entries (
  dlq_id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  kind       text NOT NULL CHECK (kind IN ('frame', 'job', 'message', 'output', 'saga')),
  reason     text NOT NULL CHECK (length(reason) BETWEEN 1 AND 100),
  cause      text NOT NULL CHECK (length(cause) BETWEEN 1 AND 500),
  lane_id    integer,
  queue      text,
  job_id     uuid,
  layer_id   uuid,
  frame      integer,
  attempt    smallint,
  payload    bytea,
  error      text,
  created_at timestamptz NOT NULL DEFAULT now(),
  UNIQUE (kind, cause)
);

CREATE INDEX ON rota.dlq_entries (job_id);

CREATE INDEX ON rota.dlq_entries (queue);

CREATE INDEX ON rota.dlq_entries (created_at);

COMMENT ON COLUMN rota.dlq_entries.cause IS 'Names what went wrong; the same cause is written once per kind.';

COMMENT ON COLUMN rota.dlq_entries.lane_id IS 'Where a frame is counted and goes back to; null for other kinds.';

-- Counters. A row of deltas is appended by every batch; one that is bound to no slot (failed, deferred, dead) has -1.
CREATE TABLE rota.queue_terminal_count_deltas (
  turn       smallint NOT NULL,
  ready_slot smallint NOT NULL,
  lane_id    integer NOT NULL,
  waiting    bigint NOT NULL,
  running    bigint NOT NULL,
  completed  bigint NOT NULL,
  cancelled  bigint NOT NULL,
  failed     bigint NOT NULL,
  deferred   bigint NOT NULL,
  dead       bigint NOT NULL
) PARTITION BY LIST (turn);

DO $$
BEGIN
  FOR turn IN 0..3 LOOP
    EXECUTE format(
      'CREATE TABLE rota.queue_terminal_count_deltas_%1$s PARTITION OF rota.queue_terminal_count_deltas'
      ' FOR VALUES IN (%1$s) WITH (autovacuum_enabled = false)', turn);
  END LOOP;
END $$;

-- Its last value mod 4 is the turn that is written to. A sequence, since changing it leaves no dead row behind.
CREATE SEQUENCE rota.queue_delta_turn MINVALUE 0;

SELECT setval('rota.queue_delta_turn', 0);

CREATE TABLE rota.queue_terminal_live_counts (
  lane_id    integer NOT NULL,
  ready_slot smallint NOT NULL,
  stripe     smallint NOT NULL DEFAULT 0,
  waiting    bigint NOT NULL DEFAULT 0,
  running    bigint NOT NULL DEFAULT 0,
  completed  bigint NOT NULL DEFAULT 0,
  cancelled  bigint NOT NULL DEFAULT 0,
  failed     bigint NOT NULL DEFAULT 0,
  deferred   bigint NOT NULL DEFAULT 0,
  dead       bigint NOT NULL DEFAULT 0,
  PRIMARY KEY (lane_id, ready_slot, stripe)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

COMMENT ON TABLE rota.queue_terminal_live_counts IS
  'Deltas that were folded. Only sums over stripes mean anything; a stripe may be negative.';

CREATE TABLE rota.queue_terminal_rollups (
  queue                  text NOT NULL,
  priority               smallint NOT NULL,
  pruned_completed_count bigint NOT NULL DEFAULT 0,
  pruned_cancelled_count bigint NOT NULL DEFAULT 0,
  pruned_failed_count    bigint NOT NULL DEFAULT 0,
  PRIMARY KEY (queue, priority)
) WITH (fillfactor = 50);

COMMENT ON TABLE rota.queue_terminal_rollups IS 'Ends whose rows were pruned, counted from those very rows.';

CREATE TYPE rota.queue_slot_counts AS (
  lane_id    integer,
  ready_slot integer,
  waiting    bigint,
  running    bigint,
  completed  bigint,
  cancelled  bigint,
  failed     bigint,
  deferred   bigint,
  dead       bigint
);

CREATE TYPE rota.queue_counted AS (
  queue     text,
  waiting   bigint,
  running   bigint,
  deferred  bigint,
  completed bigint,
  failed    bigint,
  cancelled bigint,
  dead      bigint
);

CREATE TYPE rota.queue_pieces AS (
  n        integer,
  sizes    integer[],
  jobs     uuid[],
  layers   uuid[],
  frames   integer[],
  attempts smallint[],
  payloads bytea[]
);

CREATE TYPE rota.queue_closed AS (
  ready_slot integer,
  claim_id   bigint,
  lane_id    integer,
  first_seq  bigint,
  closed     varbit
);
