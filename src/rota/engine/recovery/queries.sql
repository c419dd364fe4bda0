-- name: jobs_ending
-- Jobs whose termination has begun and not finished, $1 of those after $3, without $2.
SELECT pk_job FROM rota.job
WHERE ends_as IS NOT NULL AND pk_job > $3::uuid AND pk_job <> ALL ($2::uuid[]) ORDER BY pk_job LIMIT $1::integer

-- name: jobs_forgotten
-- Release jobs whose dependencies ended while they were being submitted; at most $1 dependencies.
SELECT rota.jobs_release(ARRAY(
  SELECT DISTINCT a.pk_before FROM rota.job_after a
  JOIN rota.job w ON w.pk_job = a.pk_job AND w.ends_as IS NULL
  WHERE NOT EXISTS (SELECT FROM rota.job j WHERE j.pk_job = a.pk_before)
    AND NOT EXISTS (SELECT FROM rota.scan s WHERE s.pk_job = a.pk_before AND s.mode <> 'pass') LIMIT $1::integer)) AS waiting

-- name: jobs_overdue
-- Jobs past their deadline, or past max_wait with no frame dispatched; $1 of each, without $2.
(SELECT pk_job, 'TIMEOUT' AS ends_as, 'deadline_expired' AS reason FROM rota.job
 WHERE ts_deadline <= clock_timestamp() AND ends_as IS NULL AND pk_job <> ALL ($2::uuid[])
 ORDER BY ts_deadline LIMIT $1::integer)
UNION ALL
(SELECT pk_job, 'FAILED', 'max_wait_expired' FROM rota.job
 WHERE ts_wait_until <= clock_timestamp() AND ends_as IS NULL AND state IN ('PENDING', 'SCHEDULED')
   AND pk_job <> ALL ($2::uuid[])
 ORDER BY ts_wait_until LIMIT $1::integer)

-- name: jobs_mark_booked
-- Mark SCHEDULED jobs as DISPATCHED whose frames have been booked for a while; returns them.
SELECT pk_job, pk_show, topic FROM rota.jobs_mark_booked()

-- name: jobs_reschedule
-- Set jobs back to SCHEDULED that have no booked frame, now and before ($1); returns all without one.
SELECT pk_job, pk_show, topic FROM rota.jobs_reschedule($1::uuid[])

-- name: pending_work
-- Whether jobs are overdue or being terminated, and whether frames are booked or jobs under way.
SELECT EXISTS (SELECT FROM rota.job WHERE ts_deadline <= now())
         OR EXISTS (SELECT FROM rota.job WHERE ts_wait_until <= now())
         OR EXISTS (SELECT FROM rota.job WHERE ends_as IS NOT NULL) AS overdue,
       EXISTS (SELECT FROM rota.job WHERE state IN ('DISPATCHED', 'RUNNING')) OR EXISTS (SELECT FROM rota.proc) AS active

-- name: procs_all
-- Procs after token $1, a page of $2: the age of the booking, and whether its job has ended meanwhile. Without those of
-- frames that have ended and hold the charge of others that run.
SELECT p.token, p.pk_host, p.pk_job, extract(epoch FROM clock_timestamp() - p.ts_booked)::float8 AS age_s, l.pk_layer IS NULL AS ended, l.work
FROM rota.proc p LEFT JOIN rota.layer l ON l.pk_layer = p.pk_layer
WHERE p.token > $1::bigint
  AND (NOT p.b_ended OR NOT EXISTS (SELECT FROM rota.proc f WHERE f.token >= p.series_first AND f.token < p.token))
ORDER BY p.token LIMIT $2::integer

-- name: procs_dead
-- Bookings of ended frames that were not removed from the table yet.
SELECT pg_stat_get_dead_tuples('rota.proc'::regclass)

-- name: procs_vacuum
-- Remove them, unless the table is locked. The end of the table is not cut off: that would lock it.
VACUUM (SKIP_LOCKED, TRUNCATE FALSE) rota.proc

-- name: procs_orphaned
-- Procs on workers that have ended, oldest first. Of a series the first frame that has not ended had started; others may
-- have ended, without a report, and are `unstarted`. `carrier`: its last token.
SELECT p.token, p.pk_host, series.carrier,
       EXISTS (SELECT FROM rota.proc f WHERE f.token >= series.first AND f.token < p.token) AS unstarted
FROM rota.proc p JOIN rota.worker w ON w.pk_host = p.pk_host
LEFT JOIN LATERAL (
  SELECT c.series_first AS first, c.token AS carrier FROM rota.proc c
  WHERE c.token >= p.token AND c.series_first IS NOT NULL ORDER BY c.token LIMIT 1
) AS series ON series.first <= p.token
WHERE w.state <> 'up' ORDER BY p.token LIMIT $1::integer

-- name: worker_end
-- Mark worker $1 as gone or lost ($2), unless it has ended already.
UPDATE rota.worker SET state = $2::text, ts_ended = clock_timestamp() WHERE pk_host = $1::uuid AND state = 'up'

-- name: wal_written
-- How many bytes of WAL were ever written.
SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint

-- name: workers_gone
-- Which of these workers have ended or are unknown.
SELECT h AS pk_host, w.state FROM unnest($1::uuid[]) AS h LEFT JOIN rota.worker w ON w.pk_host = h WHERE w.state IS DISTINCT FROM 'up'

-- name: workers_up
-- Workers that have neither signed off nor been declared lost, and the interval of their heartbeats.
SELECT pk_host, str_name, pool, heartbeat_s, extract(epoch FROM clock_timestamp() - ts_up)::float8 AS age_s FROM rota.worker WHERE state = 'up'

-- name: table_analyze
-- Renew the statistics of table $1.
SELECT rota.table_analyze($1::text)

-- name: tables_grown
-- Tables with more than $1 times the rows of their statistics, and $2 more.
SELECT name FROM rota.tables_grown($1::integer, $2::integer) AS name

-- name: upkeep_caps
-- Delete the caps of $1 jobs that have ended; number of jobs by show.
SELECT pk_show, jobs FROM rota.caps_forget($1::integer)

-- name: upkeep_carry
-- Carry over up to $2 frame ends from day $1 whose jobs are retained longer.
SELECT rota.frame_ends_carry($1::date, $2::integer)

-- name: upkeep_days
-- Days of table $1 that ended before $2, oldest first.
SELECT d.day FROM rota.days_of($1::text) AS d
WHERE ((d.day + 1)::timestamp AT TIME ZONE 'UTC') <= $2::timestamptz GROUP BY d.day ORDER BY d.day

-- name: upkeep_drop
-- Drop day $2 of table $1.
SELECT rota.day_drop($1::text, $2::date)

-- name: upkeep_items
-- Requests with a pointer to the items of a map, which may be older than $1: those of live jobs, and of jobs that lived
-- across a midnight. Only these requests contain the name of the field, or a text equal to it.
SELECT j.request FROM rota.job j WHERE position('items_at'::bytea IN j.request) > 0
UNION ALL SELECT d.request FROM rota.job_done d
  WHERE d.ts_submitted < $1::timestamptz + interval '1 day' AND position('items_at'::bytea IN d.request) > 0
    AND (d.ts_submitted AT TIME ZONE 'UTC')::date < (d.ts_finished AT TIME ZONE 'UTC')::date

-- name: upkeep_keys
-- Delete up to $2 idempotency keys from before $1 whose jobs are not live.
DELETE FROM rota.idempotency_key k USING (
  SELECT i.pk_show, i.key FROM rota.idempotency_key i
  WHERE i.ts_created < $1::timestamptz AND NOT EXISTS (SELECT FROM rota.job j WHERE j.pk_job = i.pk_job)
  ORDER BY i.ts_created LIMIT $2::integer FOR UPDATE SKIP LOCKED
) AS old WHERE k.pk_show = old.pk_show AND k.key = old.key

-- name: upkeep_make
-- Create a partition of table $1 for day $2, or for a part of it; at most $3 rows of the default partition move there.
SELECT rota.day_make($1::text, $2::date, $3::integer)

-- name: upkeep_missing
-- Days without a partition of table $1: $3 days from $2 on, and days of rows in the default partition.
SELECT wanted.day FROM (
  SELECT ($2::timestamptz AT TIME ZONE 'UTC')::date + ahead AS day FROM generate_series(0, $3::integer) AS ahead
  UNION SELECT * FROM rota.days_astray($1::text, 100)
) AS wanted
WHERE (wanted.day + 1)::timestamp AT TIME ZONE 'UTC' > ALL (
  SELECT d.until FROM rota.days_of($1::text) AS d WHERE d.day = wanted.day)
ORDER BY wanted.day

-- name: upkeep_now
-- The current time.
SELECT clock_timestamp()

-- name: upkeep_outputs
-- Delete up to $2 outputs decided before $1 whose jobs are no longer retained.
DELETE FROM rota.output o USING (
  SELECT i.token FROM rota.output i
  WHERE i.ts_decided < $1::timestamptz AND NOT EXISTS (SELECT FROM rota.job j WHERE j.pk_job = i.pk_job)
    AND NOT EXISTS (SELECT FROM rota.job_done d WHERE d.pk_job = i.pk_job)
  ORDER BY i.ts_decided LIMIT $2::integer FOR UPDATE SKIP LOCKED
) AS old WHERE o.token = old.token

-- name: upkeep_patience
-- Lock timeout of $1 ms in this transaction; it also bounds how long others wait for our locks.
SELECT set_config('lock_timeout', $1::text, true)

-- name: upkeep_pointers
-- Pointers into the store that are in use and may be older than $1: those of live jobs, of jobs that lived across a
-- midnight, and of frame ends that were carried over or are close to the cutoff.
SELECT input_at AS pointer FROM rota.layer WHERE input_at IS NOT NULL
UNION SELECT l.input_at FROM rota.job_done d CROSS JOIN LATERAL unnest(d.layers) AS l
  WHERE d.ts_submitted < $1::timestamptz + interval '1 day' AND l.input_at IS NOT NULL
    AND (d.ts_submitted AT TIME ZONE 'UTC')::date < (d.ts_finished AT TIME ZONE 'UTC')::date
UNION SELECT split_part(unnest(e.artifacts || e.value_at), ' ', 1) FROM rota.frame_end e
  WHERE e.ts_ended IS NOT NULL AND (e.value_at IS NOT NULL OR e.artifacts IS NOT NULL)
UNION SELECT split_part(unnest(e.artifacts || e.value_at), ' ', 1) FROM rota.frame_end e
  WHERE e.ts_finished < $1::timestamptz + interval '2 days' AND (e.value_at IS NOT NULL OR e.artifacts IS NOT NULL)
UNION SELECT split_part(unnest(o.original), ' ', 1) FROM rota.output o WHERE o.original IS NOT NULL

-- name: upkeep_reasons
-- Live jobs that wait for something other than their position in the queue, by reason.
SELECT w.reason, count(*) AS jobs
FROM (
  SELECT CASE WHEN ends_as IS NOT NULL THEN 'ending' WHEN state = 'APPROVAL_REQUIRED' THEN 'approval_required'
              ELSE coalesce(reason, 'policy_pending') END AS reason
  FROM rota.job WHERE state IN ('PENDING', 'APPROVAL_REQUIRED') OR ends_as IS NOT NULL
  UNION ALL
  SELECT CASE WHEN j.reason = 'tenant_limit' THEN 'tenant_limit' ELSE 'quota_job' END
  FROM (SELECT DISTINCT parked_job FROM rota.queue_returned WHERE parked_job IS NOT NULL) AS p
  JOIN rota.job j ON j.pk_job = p.parked_job AND j.ends_as IS NULL
  UNION ALL
  SELECT 'deferred' FROM (SELECT DISTINCT job_id FROM rota.deferred_jobs) AS d
) AS w
GROUP BY w.reason

-- name: upkeep_states
-- Number of live jobs by state, and the age of the oldest.
SELECT state, count(*) AS jobs, extract(epoch FROM clock_timestamp() - min(ts_updated))::float8 AS oldest_s
FROM rota.job GROUP BY state

-- name: upkeep_workers
-- Delete up to $2 workers that ended before $1 and have no procs.
DELETE FROM rota.worker w USING (
  SELECT o.pk_host FROM rota.worker o
  WHERE o.state <> 'up' AND o.ts_ended < $1::timestamptz
    AND NOT EXISTS (SELECT FROM rota.proc p WHERE p.pk_host = o.pk_host)
  ORDER BY o.ts_ended LIMIT $2::integer FOR UPDATE SKIP LOCKED
) AS old WHERE w.pk_host = old.pk_host
