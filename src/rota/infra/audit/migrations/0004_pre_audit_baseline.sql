-- Audit log: append-only and hash-chained, so that tampering is detectable. Only rota.audit_append writes it.

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

COMMENT ON COLUMN rota.audit.seq IS 'Starts at 1 and has no gaps; in commit order.';

COMMENT ON COLUMN rota.audit.hash IS 'SHA-256 of this row and prev_hash; `rota audit verify` recomputes it.';

-- The end of the chain. Its row lock serializes writers and is held until their transaction ends.
CREATE TABLE rota.audit_head (
  one  boolean PRIMARY KEY DEFAULT true CHECK (one),
  seq  bigint NOT NULL,
  hash bytea NOT NULL
) WITH (fillfactor = 50);

INSERT INTO rota.audit_head (seq, hash) VALUES (0, decode(repeat('00', 32), 'hex'));
