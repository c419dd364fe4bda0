-- Older versions wrote codes of attempts as the reason of a job.
UPDATE rota.job SET reason = 'dispatch_failed' WHERE NOT rota.is_reason(reason);

ALTER TABLE rota.job ADD CONSTRAINT job_reason CHECK (rota.is_reason(reason)) NOT VALID;
