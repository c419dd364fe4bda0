-- Interval of a worker's heartbeats, as given when it registered; a later change of the setting does not reach it.
ALTER TABLE rota.worker ADD COLUMN heartbeat_s float8 NOT NULL DEFAULT 2;
