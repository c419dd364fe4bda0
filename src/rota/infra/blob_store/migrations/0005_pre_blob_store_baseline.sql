-- Values that are too large for a message, by the hash of their content; a value is stored once per day. Partitions of
-- days past their retention are dropped, after values that are still in use were copied to a current day.
CREATE TABLE rota.blob (
  sha256 bytea NOT NULL CHECK (length(sha256) = 32),
  data   bytea NOT NULL,
  ts_put timestamptz NOT NULL DEFAULT now()
) PARTITION BY RANGE (ts_put);

CREATE TABLE rota.blob_default PARTITION OF rota.blob DEFAULT;

CREATE INDEX ON rota.blob (sha256);

ALTER TABLE rota.blob ALTER COLUMN data SET STORAGE EXTERNAL;
