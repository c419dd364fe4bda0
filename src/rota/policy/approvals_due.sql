-- Approvals that nobody gave in time, the oldest first; at most $1.
SELECT pk_approval FROM rota.approval WHERE state = 'pending' AND ts_expires <= clock_timestamp()
ORDER BY ts_expires LIMIT $1::integer
