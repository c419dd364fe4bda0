-- PENDING jobs that the policy is to be asked about again by now, the longest due first; at most $1.
SELECT pk_job FROM rota.job
WHERE ts_ask_at <= clock_timestamp() AND state = 'PENDING' AND ends_as IS NULL
ORDER BY ts_ask_at LIMIT $1::integer
