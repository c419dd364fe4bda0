-- When a job that could not be assigned to a worker is tried again, and the code of its last failure.
ALTER TABLE rota.job ADD COLUMN ts_dispatch_retry timestamptz, ADD COLUMN dispatch_error text;
