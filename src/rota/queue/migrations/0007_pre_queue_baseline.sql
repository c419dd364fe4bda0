-- The queue of frames: storage and counts. See ADR 13.
-- A position in a lane, (lane_id, lane_seq), is one attempt of a frame. A claim covers up to 512 consecutive positions;
-- the token of a claimed position is claim_id * 512 + its offset in the claim, which is below 2^53 for 2^41 claims.

CREATE TABLE rota.queues (
  queue          text PRIMARY KEY CHECK (length(queue) BETWEEN 1 AND 200),
  enqueue_shards smallint NOT NULL DEFAULT 4 CHECK (enqueue_shards BETWEEN 1 AND 64),
  paused         boolean NOT NULL DEFAULT false,
  dlq_on_fail    boolean NOT NULL DEFAULT false,
  created_at     timestamptz NOT NULL DEFAULT now()
);

COMMENT ON COLUMN rota.queues.enqueue_shards IS
  'A producer whose shard is locked uses the next one. With 1 shard, producers wait and the order is strict.';

CREATE TABLE rota.queue_lanes (
  lane_id       integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  queue         text NOT NULL REFERENCES rota.queues,
  priority      smallint NOT NULL CHECK (priority BETWEEN 1 AND 9),
  enqueue_shard smallint NOT NULL CHECK (enqueue_shard >= 0),
  UNIQUE (queue, priority, enqueue_shard)
);

-- One row. The operator chooses the mode; counters are not trusted if they were not maintained for some time.
CREATE TABLE rota.queue_storage (
  one              boolean PRIMARY KEY DEFAULT true CHECK (one),
  counter_mode     text NOT NULL DEFAULT 'ledger' CHECK (counter_mode IN ('ledger', 'upsert', 'scan')),
  counter_stripes  smallint NOT NULL DEFAULT 1 CHECK (counter_stripes BETWEEN 1 AND 256),
  counters_trusted boolean NOT NULL DEFAULT true
);

INSERT INTO rota.queue_storage DEFAULT VALUES;

-- The ring: slots 0 to 6 are used in rotation, slot = generation mod 7. Slot 7 holds positions that outlive their slot.
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

COMMENT ON TABLE rota.ready_entries IS
  'Positions lane_seq to lane_seq + n - 1, for the frames frame to frame + n - 1 of a layer.';

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
  'Positions last_seq - n + 1 to last_seq were claimed; the cursor of a lane follows its largest last_seq.';

COMMENT ON COLUMN rota.queue_claims.n IS '0: nothing was claimed, only the cursor of the lane moved.';

CREATE TABLE rota.queue_closures (
  ready_slot   smallint NOT NULL,
  claim_id     bigint NOT NULL,
  outcome      smallint NOT NULL,
  n            smallint NOT NULL CHECK (n > 0),
  bits         varbit NOT NULL,
  finalized_at timestamptz NOT NULL DEFAULT now()
) PARTITION BY LIST (ready_slot);

COMMENT ON COLUMN rota.queue_closures.outcome IS
  '0 skipped (cancelled while waiting), 1 completed, 2 failed, 3 cancelled, 4 retried or deferred, 5 returned.';

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

-- End and cursor of a lane, recorded when the slots from which they were derived are pruned.
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

COMMENT ON TABLE rota.ready_tombstones IS
  'Positions that were cancelled before they were claimed; ranges never overlap.';

-- Few and short-lived rows, so they are updated and deleted in place.
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

COMMENT ON TABLE rota.queue_returned IS
  'Positions behind the cursor that wait again; they are claimed before those at the cursor.';

COMMENT ON COLUMN rota.queue_returned.parked_job IS
  'Not claimed until this job is unparked: it is at a limit or being terminated. Null: claimable.';

CREATE TABLE rota.queue_owners (
  owner      bigint PRIMARY KEY,
  lease      text NOT NULL,
  dead       boolean NOT NULL DEFAULT false,
  started_at timestamptz NOT NULL DEFAULT now()
);

COMMENT ON TABLE rota.queue_owners IS
  'Dispatchers, by the fence of their lease. A dead one is deleted once the claims that it did not book are returned.';

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

-- Failed frames, written once and kept for the retention period; the slot of their position may be pruned earlier.
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

-- Dead letters of all components.
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

COMMENT ON COLUMN rota.dlq_entries.cause IS 'Identifies the failure; a cause is stored once per kind.';

COMMENT ON COLUMN rota.dlq_entries.lane_id IS
  'Lane in which a frame is counted and to which it returns; null for other kinds.';

-- In counter_mode `ledger` every batch appends its changes of the counts as deltas. Counts that belong to no slot
-- (failed, deferred, dead) have ready_slot -1.
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

-- Its last value mod 4 is the delta partition (`turn`) in use. A sequence, because advancing it leaves no dead row.
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
  'Counts with the merged deltas. Only sums over stripes are meaningful; a stripe may be negative.';

CREATE TABLE rota.queue_terminal_rollups (
  queue                  text NOT NULL,
  priority               smallint NOT NULL,
  pruned_completed_count bigint NOT NULL DEFAULT 0,
  pruned_cancelled_count bigint NOT NULL DEFAULT 0,
  pruned_failed_count    bigint NOT NULL DEFAULT 0,
  PRIMARY KEY (queue, priority)
) WITH (fillfactor = 50);

COMMENT ON TABLE rota.queue_terminal_rollups IS
  'Frames that ended and whose rows were pruned, counted from those rows.';

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
