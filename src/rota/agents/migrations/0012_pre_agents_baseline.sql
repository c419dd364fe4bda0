-- Recurring agents: what they are, who runs them, and what came of it. See docs/adr/0018-agents.md.

-- A block of 1024 run numbers for each call: a number is never given twice, whatever Redis forgets.
CREATE SEQUENCE rota.agent_run_block;

-- Grows from one run of an agent to the next, which run numbers do not: they are given out in advance.
CREATE SEQUENCE rota.agent_token;

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

  -- room for the next due time in the same page, so that it touches no index

COMMENT ON COLUMN rota.agent.ts_due IS 'When its schedule has it run next, by the clock of Redis; null: never again.';

COMMENT ON COLUMN rota.agent.ts_next IS 'When it runs next, for its schedule or for a backfill; its schedule goes first.';

COMMENT ON COLUMN rota.agent.ts_backfill_due IS 'When the next run of a backfill may begin; null: there is none.';

COMMENT ON COLUMN rota.agent.ts_backfill_slot IS 'The past moment of its schedule that this run is for; the last is ts_backfill_until.';

COMMENT ON COLUMN rota.agent.ts_slot IS 'The moment of its schedule that the next run is for; a retry comes later than its slot.';

COMMENT ON COLUMN rota.agent.queued IS 'One more run is wanted as soon as the present one has ended.';

COMMENT ON COLUMN rota.agent.streak IS 'Failures in a row, on whatever replica.';

COMMENT ON COLUMN rota.agent.runs IS 'Runs that have ended; the next one is written to place runs % 50 of the ring.';

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

COMMENT ON TABLE rota.agent_running IS 'The present run of each agent. The primary key is why an agent never overlaps itself.';

COMMENT ON COLUMN rota.agent_running.token IS 'For what the body writes elsewhere: who comes with a smaller one than was seen is late.';

COMMENT ON COLUMN rota.agent_running.name IS 'Who runs is not removed: declared anew, it would run beside itself.';

COMMENT ON COLUMN rota.agent_running.fence IS 'With lease: the grant in rota.lease for as long as which this run lives.';

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

COMMENT ON TABLE rota.agent_run IS 'The last 50 runs of each agent: a ring, so that it never needs pruning.';
