-- Who did what: append-only and chained by hashes, so that a change leaves a trace. Written by rota.audit_append alone.

CREATE TABLE rota.audit (
  seq       bigint PRIMARY KEY,
  at        timestamptz NOT NULL,
  actor     text NOT NULL,
  action    text NOT NULL,
  target    text NOT NULL,
  detail    jsonb NOT NULL,
  prev_hash bytea NOT NULL,
  hash      bytea NOT NULL
);

COMMENT ON COLUMN rota.audit.seq IS 'From 1 without a gap, in the order of commits.';

COMMENT ON COLUMN rota.audit.hash IS 'SHA-256 of this row and prev_hash; `rota audit verify` computes it again.';

-- The end of the chain. Its row lock puts writers in a row and is held until their transaction ends.
CREATE TABLE rota.audit_head (
  one  boolean PRIMARY KEY DEFAULT true CHECK (one),
  seq  bigint NOT NULL,
  hash bytea NOT NULL
) WITH (fillfactor = 50);

INSERT INTO rota.audit_head (seq, hash) VALUES (0, decode(repeat('00', 32), 'hex'));
