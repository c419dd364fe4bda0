-- Messages that are committed together with what they tell. See docs/adr/0007-outbox-and-bus.md.

-- Rows live for milliseconds: inserted by a room's transaction, deleted by the relay. No index but the key's.
CREATE TABLE rota.outbox (
  id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  subject    text NOT NULL,
  msg_id     text NOT NULL,
  headers    jsonb CHECK (
    jsonb_typeof(headers) = 'object' AND NOT jsonb_path_exists(headers, '$.* ? (@.type() != "string")')
  ),
  payload    bytea NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now()
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);

-- Payloads are written and read once: compressing them is wasted work.
ALTER TABLE rota.outbox ALTER COLUMN payload SET STORAGE EXTERNAL;

COMMENT ON TABLE rota.outbox IS 'Messages to be published; a row is deleted when the bus has confirmed its message.';

COMMENT ON COLUMN rota.outbox.id IS 'Order of insertion, not of commit.';

COMMENT ON COLUMN rota.outbox.msg_id IS 'Names the fact that is told. The bus stores an id once within its dedup window.';

-- A table of its own, so that rows which never leave are not in the way of those that do.
CREATE TABLE rota.outbox_parked (
  id         bigint PRIMARY KEY,
  subject    text NOT NULL,
  msg_id     text NOT NULL,
  headers    jsonb,
  payload    bytea NOT NULL,
  created_at timestamptz NOT NULL,
  parked_at  timestamptz NOT NULL DEFAULT now(),
  reason     text NOT NULL
);

ALTER TABLE rota.outbox_parked ALTER COLUMN payload SET STORAGE EXTERNAL;

COMMENT ON TABLE rota.outbox_parked IS 'Messages that the bus can never take as they are, each with the reason why.';
