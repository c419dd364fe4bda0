-- No version that knows stripes runs any more.
-- squawk-ignore ban-drop-column
ALTER TABLE rota.queue_terminal_live_counts DROP COLUMN stripe;

ALTER TABLE rota.queue_terminal_live_counts ADD PRIMARY KEY USING INDEX queue_counts_key;

COMMENT ON TABLE rota.queue_terminal_live_counts IS 'Counts with the merged deltas.';

-- squawk-ignore ban-drop-column
ALTER TABLE rota.queue_storage DROP COLUMN counter_stripes;

-- squawk-ignore ban-drop-constraint
ALTER TABLE rota.queue_storage DROP CONSTRAINT queue_storage_counter_mode_check;

ALTER TABLE rota.queue_storage
  ADD CONSTRAINT queue_storage_counter_mode_check CHECK (counter_mode IN ('ledger', 'scan')) NOT VALID;
