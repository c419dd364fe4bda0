-- Recurring agents: definitions, current runs and history. See ADR 18.

-- Each value is a block of 1024 run numbers, so that a number is never issued twice, even if Redis loses data.
CREATE SEQUENCE rota.agent_run_block;

-- Fencing tokens: they increase from run to run of an agent. Run numbers do not, because they are allocated in advance.
CREATE SEQUENCE rota.agent_token;

-- The fillfactor leaves room for the next due time in the same page (HOT updates), so that it writes no index.
CREATE TABLE rota.agent (
  name         text PRIMARY KEY CHECK (length(name) BETWEEN 1 AND 200),
  shard_group  text NOT NULL DEFAULT '',
  spec         jsonb NOT NULL,
  ts_due       timestamptz,
  ts_slot      timestamptz,
  ts_backfill_due    timestamptz,
  ts_backfill_slot   timestamptz,
  ts_backfill_until  timestamptz,
  ts_next      timestamptz GENERATED ALWAYS AS (least(ts_due, ts_backfill_due)) STORED,
  queued       boolean NOT NULL DEFAULT false,
  paused       boolean NOT NULL DEFAULT false,
  streak       integer NOT NULL DEFAULT 0,
  failure      text,
  error        text,
  runs         bigint NOT NULL DEFAULT 0,
  ts_declared  timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 50);

COMMENT ON COLUMN rota.agent.ts_due IS 'Next due time by the schedule, by the clock of Redis; null: never again.';

COMMENT ON COLUMN rota.agent.ts_next IS
  'Next due time, by the schedule or by a backfill; if both are due, the schedule goes first.';

COMMENT ON COLUMN rota.agent.ts_backfill_due IS 'Due time of the next backfill run; null: no backfill.';

COMMENT ON COLUMN rota.agent.ts_backfill_slot IS
  'Past slot of the schedule that the next backfill run is for; the backfill ends at ts_backfill_until.';

COMMENT ON COLUMN rota.agent.ts_slot IS
  'Slot of the schedule that the next run is for; a retry is due later than its slot.';

COMMENT ON COLUMN rota.agent.queued IS 'Whether one more run is requested, to begin as soon as the current run ends.';

COMMENT ON COLUMN rota.agent.streak IS 'Number of consecutive failures, on any replica.';

COMMENT ON COLUMN rota.agent.runs IS
  'Number of ended runs; the next one to end is stored at place runs % 50 of rota.agent_run.';

CREATE TABLE rota.agent_running (
  name         text PRIMARY KEY REFERENCES rota.agent,
  run          bigint NOT NULL,
  lease        text NOT NULL,
  fence        bigint NOT NULL,
  replica      text NOT NULL,
  token        bigint NOT NULL DEFAULT nextval('rota.agent_token'),
  quarantined  boolean NOT NULL DEFAULT false,
  backfill     boolean NOT NULL,
  ts_slot      timestamptz,
  ts_due       timestamptz NOT NULL,
  ts_acquired  timestamptz NOT NULL,
  ts_deadline  timestamptz NOT NULL
);

COMMENT ON TABLE rota.agent_running IS
  'The current run of each agent. The primary key guarantees that an agent never overlaps itself.';

COMMENT ON COLUMN rota.agent_running.token IS
  'Fencing token for external writes of the run: a token smaller than one already seen is stale.';

COMMENT ON COLUMN rota.agent_running.name IS
  'The foreign key keeps an agent with a run from being deleted: declared again, it would overlap itself.';

COMMENT ON COLUMN rota.agent_running.fence IS 'With lease: the grant in rota.lease that keeps this run alive.';

CREATE TABLE rota.agent_run (
  name         text NOT NULL REFERENCES rota.agent ON DELETE CASCADE,
  place        smallint NOT NULL,
  run          bigint NOT NULL,
  replica      text NOT NULL,
  outcome      text NOT NULL CHECK (outcome IN ('SUCCEEDED', 'FAILED', 'TIMEOUT', 'CANCELLED', 'LOST', 'SKIPPED')),
  failure      text,
  error        text,
  took_ms      bigint NOT NULL,
  backfill     boolean NOT NULL,
  ts_slot      timestamptz,
  ts_due       timestamptz NOT NULL,
  ts_started   timestamptz NOT NULL,
  PRIMARY KEY (name, place)
) WITH (fillfactor = 50);

COMMENT ON TABLE rota.agent_run IS 'The last 50 runs of each agent: a ring buffer, so that no pruning is needed.';
