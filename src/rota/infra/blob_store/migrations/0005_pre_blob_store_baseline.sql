-- Values that are too large to travel, by what they are: the same one is there once a day. Days past their retention are
-- dropped whole, after what is still in use was written again.
CREATE TABLE rota.blob (
  sha256 bytea NOT NULL CHECK (length(sha256) = 32),
  data   bytea NOT NULL,
  ts_put timestamptz NOT NULL DEFAULT now()
) PARTITION BY RANGE (ts_put);

CREATE TABLE rota.blob_default PARTITION OF rota.blob DEFAULT;

CREATE INDEX ON rota.blob (sha256);

ALTER TABLE rota.blob ALTER COLUMN data SET STORAGE EXTERNAL;
