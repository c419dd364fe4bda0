-- Older versions stored statuses of attempts, and whatever a worker reported, as codes.
UPDATE rota.job_done SET reason = 'dispatch_failed' WHERE NOT rota.is_reason(reason);

UPDATE rota.frame_end SET code = 'exception' WHERE NOT rota.is_attempt_code(code);

-- In the order in which ends of frames are written, so that neither waits for the other.
ALTER TABLE rota.frame_end ADD CONSTRAINT frame_end_code CHECK (rota.is_attempt_code(code)) NOT VALID;

ALTER TABLE rota.job_done ADD CONSTRAINT job_done_reason CHECK (rota.is_reason(reason)) NOT VALID;
