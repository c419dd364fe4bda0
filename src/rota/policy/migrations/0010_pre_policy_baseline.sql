-- Policy decisions and approvals. See ADR 20.

-- Each distinct policy decision once; jobs refer to theirs by number. Rows are never deleted: there are only as many as
-- rules that decided, times the policy snapshots in which they did.
CREATE TABLE rota.policy_word (
  word      integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  digest    bytea NOT NULL UNIQUE CHECK (length(digest) = 32),
  told      bytea NOT NULL,
  jobs_max  integer CHECK (jobs_max > 0),
  ts_first  timestamptz NOT NULL DEFAULT clock_timestamp()
);

COMMENT ON COLUMN rota.policy_word.jobs_max IS
  'Limit on concurrent jobs of the show, for jobs admitted by this decision; null: unlimited.';

COMMENT ON COLUMN rota.policy_word.told IS 'PolicyDecision, msgpack; digest is its SHA-256.';

-- Approvals of jobs and of steps of workflows. A subject has at most one pending approval.
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

COMMENT ON COLUMN rota.approval.subject IS 'Id of a job, or RUN:STEP for a step of a workflow run.';

COMMENT ON COLUMN rota.approval.state IS
  'closed: the subject ended first; stale: the stored subject differs from the one to be approved.';

COMMENT ON COLUMN rota.approval.hash IS
  'Hash of the submission when approval of the subject was first requested; never recomputed for that subject.';

COMMENT ON COLUMN rota.approval.approvers IS 'Names of keys that may vote; empty: every operator of the show.';

COMMENT ON COLUMN rota.approval.principal IS
  'Submitter of the subject. Neither the principal nor the actor may approve it.';

CREATE TABLE rota.approval_vote (
  pk_approval uuid NOT NULL REFERENCES rota.approval ON DELETE CASCADE,
  voter       text NOT NULL,
  agrees      boolean NOT NULL,
  reason      text NOT NULL DEFAULT '',
  ts_voted    timestamptz NOT NULL DEFAULT clock_timestamp(),
  PRIMARY KEY (pk_approval, voter)
);

-- Whether servers evaluate a policy before jobs run. Submitters with other settings are bound by it too.
CREATE TABLE rota.policy_guard (
  only_one boolean PRIMARY KEY DEFAULT true CHECK (only_one),
  asks     boolean NOT NULL
);

INSERT INTO rota.policy_guard (asks) VALUES (false);

COMMENT ON TABLE rota.policy_guard IS
  'Set by each server when it starts. While asks is true, PostgreSQL queues no job without a policy decision.';
