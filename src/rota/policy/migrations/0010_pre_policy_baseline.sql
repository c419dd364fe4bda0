-- What the policy said, and what people approved. See docs/adr/0020-policy.md.

-- Each distinct word once; jobs name theirs by number for as long as they are kept. Words are never removed: there are as
-- many as rules that spoke, times the snapshots in which they did.
CREATE TABLE rota.policy_word (
  word      integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  digest    bytea NOT NULL UNIQUE CHECK (length(digest) = 32),
  told      bytea NOT NULL,
  jobs_max  integer CHECK (jobs_max > 0),
  ts_first  timestamptz NOT NULL DEFAULT clock_timestamp()
);

COMMENT ON COLUMN rota.policy_word.jobs_max IS 'Jobs of a show that run at a time, for those that were let in by it; null: as many as there are.';

COMMENT ON COLUMN rota.policy_word.told IS 'rota.model.policy.Word, msgpack; digest is its sha256.';

-- What waits, or waited, for people to agree: a job, or a step of a workflow. A subject has at most one that is pending.
CREATE TABLE rota.approval (
  pk_approval  uuid PRIMARY KEY,
  kind         text NOT NULL CHECK (kind IN ('job', 'step')),
  subject      text NOT NULL CHECK (length(subject) BETWEEN 1 AND 500),
  pk_show      uuid NOT NULL,
  state        text NOT NULL DEFAULT 'pending'
                 CHECK (state IN ('pending', 'granted', 'rejected', 'expired', 'closed', 'stale')),
  hash         bytea NOT NULL CHECK (length(hash) = 32),
  title        text NOT NULL DEFAULT '',
  reason       text NOT NULL DEFAULT '',
  rule         text NOT NULL DEFAULT '',
  snapshot     text NOT NULL DEFAULT '',
  quorum       integer NOT NULL DEFAULT 1 CHECK (quorum > 0),
  approvers    text[] NOT NULL DEFAULT '{}',
  principal    text NOT NULL DEFAULT '',
  actor        text NOT NULL DEFAULT '',
  ts_requested timestamptz NOT NULL DEFAULT clock_timestamp(),
  ts_expires   timestamptz,
  ts_decided   timestamptz,
  CHECK ((state = 'pending') = (ts_decided IS NULL))
);

CREATE UNIQUE INDEX approval_pending ON rota.approval (kind, subject) WHERE state = 'pending';

CREATE INDEX ON rota.approval (kind, subject);

CREATE INDEX ON rota.approval (ts_expires) WHERE state = 'pending';

CREATE INDEX ON rota.approval (ts_decided) WHERE state <> 'pending';

COMMENT ON COLUMN rota.approval.subject IS 'The id of a job; or what a workflow calls one of its steps.';

COMMENT ON COLUMN rota.approval.state IS 'closed: its subject ended before; stale: what is stored is not what was asked about.';

COMMENT ON COLUMN rota.approval.hash IS 'Of what was submitted, when approval of the subject was first asked for. Never computed again for the same subject.';

COMMENT ON COLUMN rota.approval.approvers IS 'Names of keys that may agree; empty: every operator of the show.';

COMMENT ON COLUMN rota.approval.principal IS 'Who submitted it, who therefore may not agree; nor may its actor.';

CREATE TABLE rota.approval_vote (
  pk_approval uuid NOT NULL REFERENCES rota.approval ON DELETE CASCADE,
  voter       text NOT NULL,
  agrees      boolean NOT NULL,
  reason      text NOT NULL DEFAULT '',
  ts_voted    timestamptz NOT NULL DEFAULT clock_timestamp(),
  PRIMARY KEY (pk_approval, voter)
);

-- Whether servers ask a policy before jobs run: then nobody queues a job without a word, whatever it was told itself.
CREATE TABLE rota.policy_guard (
  only_one boolean PRIMARY KEY DEFAULT true CHECK (only_one),
  asks     boolean NOT NULL
);

INSERT INTO rota.policy_guard (asks) VALUES (false);

COMMENT ON TABLE rota.policy_guard IS 'What the server that started last says: rota.job_submit refuses to queue jobs without a word while it asks.';
