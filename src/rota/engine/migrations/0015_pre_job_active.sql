-- no transaction
-- Jobs that frames may be booked for, of all live ones.
CREATE INDEX CONCURRENTLY IF NOT EXISTS job_active ON rota.job (pk_job) WHERE state IN ('DISPATCHED', 'RUNNING');
