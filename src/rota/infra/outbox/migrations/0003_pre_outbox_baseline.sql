-- Outbox: messages are committed in the transaction of the change that they report. See ADR 7.

-- Rows live for milliseconds: the relay deletes them after publishing. Hence no index besides the primary key.
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

-- Payloads are written and read once, so compression does not pay.
ALTER TABLE rota.outbox ALTER COLUMN payload SET STORAGE EXTERNAL;

COMMENT ON TABLE rota.outbox IS 'Messages to publish; a row is deleted when the bus has acknowledged its message.';

COMMENT ON COLUMN rota.outbox.id IS 'Order of insertion, not of commit.';

COMMENT ON COLUMN rota.outbox.msg_id IS
  'Deduplication id: the bus stores messages with the same id once within its deduplication window.';

-- A separate table, so that messages that cannot be published do not slow down scans for those that can.
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

COMMENT ON TABLE rota.outbox_parked IS 'Messages that the bus can never accept as they are, each with the reason.';
