-- Jobs past their deadline, or past the time in which a frame of theirs should have been dispatched; $1 of each, without $2.
(SELECT pk_job, 'TIMEOUT' AS ends_as, 'deadline_expired' AS reason FROM rota.job
 WHERE ts_deadline <= clock_timestamp() AND ends_as IS NULL AND pk_job <> ALL ($2::uuid[])
 ORDER BY ts_deadline LIMIT $1::integer)
UNION ALL
(SELECT pk_job, 'FAILED', 'max_wait_expired' FROM rota.job
 WHERE ts_wait_until <= clock_timestamp() AND ends_as IS NULL AND state IN ('PENDING', 'SCHEDULED')
   AND pk_job <> ALL ($2::uuid[])
 ORDER BY ts_wait_until LIMIT $1::integer)
