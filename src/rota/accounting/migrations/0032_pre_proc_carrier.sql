-- no transaction
-- Finds the carrier of a series by any of its tokens; has no other rows.
CREATE INDEX CONCURRENTLY IF NOT EXISTS proc_carrier ON rota.proc (token) WHERE series_first IS NOT NULL;
