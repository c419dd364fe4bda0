-- Older versions stored statuses of attempts, and whatever a worker reported, as codes.
UPDATE rota.done_entries SET reason = 'exception' WHERE NOT rota.is_attempt_code(reason);

UPDATE rota.dlq_entries SET reason = CASE kind WHEN 'message' THEN 'unreadable_message'
                                               WHEN 'saga' THEN 'saga_compensation_failed' ELSE 'exception' END
WHERE NOT rota.is_dead_letter_reason(reason);

ALTER TABLE rota.done_entries ADD CONSTRAINT done_entries_reason CHECK (rota.is_attempt_code(reason)) NOT VALID;

ALTER TABLE rota.dlq_entries ADD CONSTRAINT dlq_entries_reason CHECK (rota.is_dead_letter_reason(reason)) NOT VALID;
