ALTER TABLE rota.done_entries VALIDATE CONSTRAINT done_entries_reason;

ALTER TABLE rota.dlq_entries VALIDATE CONSTRAINT dlq_entries_reason;
