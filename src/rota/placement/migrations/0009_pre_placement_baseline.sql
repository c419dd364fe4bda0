-- Routing of topics to pools, and the configuration of pools. See docs/explanation/placement.md.

-- A pool (rota.alloc) without a row here is active and provides nothing.
CREATE TABLE rota.pool_spec (
  pk_alloc         uuid PRIMARY KEY REFERENCES rota.alloc ON DELETE CASCADE,
  provides         text[] NOT NULL DEFAULT '{}',
  status           text NOT NULL DEFAULT 'active' CHECK (status IN ('active', 'draining', 'inactive')),
  description      text NOT NULL DEFAULT '',
  ts_drain_started timestamptz,
  drain_timeout_s  integer NOT NULL DEFAULT 300 CHECK (drain_timeout_s BETWEEN 1 AND 3600),
  CHECK ((status = 'draining') = (ts_drain_started IS NOT NULL))
);

-- The foreign key keeps a pool with topics from being deleted: their jobs would fail, or run in a pool that was not
-- intended for them.
CREATE TABLE rota.topic_pool (
  topic    text NOT NULL CHECK (length(topic) BETWEEN 1 AND 200),
  place    smallint NOT NULL CHECK (place >= 0),
  pk_alloc uuid NOT NULL REFERENCES rota.alloc,
  PRIMARY KEY (topic, place),
  UNIQUE (topic, pk_alloc)
);

CREATE INDEX ON rota.topic_pool (pk_alloc);

COMMENT ON COLUMN rota.topic_pool.topic IS 'A topic, or a glob in which * matches any text.';

COMMENT ON COLUMN rota.topic_pool.place IS 'Order in which the pools of a topic are used.';

CREATE TABLE rota.routing_file (
  b_one     boolean PRIMARY KEY DEFAULT true CHECK (b_one),
  digest    bytea NOT NULL,
  ts_loaded timestamptz NOT NULL DEFAULT now()
);

COMMENT ON TABLE rota.routing_file IS
  'Digest of the last loaded content of pools.yaml: loading the same content again changes nothing.';
