-- API keys, of which only digests are stored, and their roles per show. See docs/howto/keys.md.

CREATE TABLE rota.api_key (
  id           text PRIMARY KEY CHECK (id ~ '^[0-9a-z]{10}$'),
  digest       bytea NOT NULL CHECK (octet_length(digest) = 32),
  name         text NOT NULL CHECK (length(name) BETWEEN 1 AND 64),
  ts_created   timestamptz NOT NULL DEFAULT now(),
  ts_expires   timestamptz,
  ts_last_used timestamptz,
  ts_revoked   timestamptz
) WITH (fillfactor = 50);

COMMENT ON COLUMN rota.api_key.digest IS 'SHA-256 of the whole key; the key itself is not stored.';

COMMENT ON COLUMN rota.api_key.ts_expires IS 'Measured by the clock of this server; null: the key does not expire.';

COMMENT ON COLUMN rota.api_key.ts_last_used IS 'Accurate to about a minute; written in batches.';

COMMENT ON COLUMN rota.api_key.ts_revoked IS 'Revoked keys are kept, so that audit entries can be attributed.';

-- Deleting a show deletes its grants. b_every, and not a null show alone, denotes a grant for all shows, so that
-- deleting a show can never turn its grants into grants for all.
CREATE TABLE rota.api_grant (
  key_id  text NOT NULL REFERENCES rota.api_key ON DELETE CASCADE,
  b_every boolean NOT NULL,
  pk_show uuid REFERENCES rota.show ON DELETE CASCADE,
  role    text NOT NULL CHECK (role IN ('viewer', 'submitter', 'operator', 'admin')),
  CHECK (b_every = (pk_show IS NULL)),
  UNIQUE (key_id, pk_show)
);

CREATE UNIQUE INDEX ON rota.api_grant (key_id) WHERE b_every;

CREATE INDEX ON rota.api_grant (pk_show);
