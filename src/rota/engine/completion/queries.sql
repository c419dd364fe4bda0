-- name: job_lock
-- Lock job $1 against admission until the transaction ends.
SELECT state FROM rota.job WHERE pk_job = $1::uuid AND state IN ('PENDING', 'APPROVAL_REQUIRED') FOR UPDATE

-- name: job_open_layers
-- Layers of job $1 while it is ending, with the number of frames that were never queued.
SELECT l.pk_layer, CASE WHEN j.state IN ('PENDING', 'APPROVAL_REQUIRED') THEN l.frames ELSE 0 END AS unqueued,
       j.ends_as, j.reason
FROM rota.job j JOIN rota.layer l ON l.pk_job = j.pk_job
WHERE j.pk_job = $1::uuid AND j.ends_as IS NOT NULL ORDER BY l.pk_layer

-- name: job_procs
-- Bookings of job $1.
SELECT token, pk_layer FROM rota.proc WHERE pk_job = $1::uuid ORDER BY token LIMIT $2::integer

-- name: dispatch_failed
-- Count a dispatch failure of jobs $1 with the code $2; returns the count so far. The $5th is the reason of their end.
-- The delay after a failure doubles from $3 s to $4 s. Failures during the delay count as one with the last: an outage
-- that hits a large layer frame by frame must not use up its attempts. Ten minutes after the delay the count restarts.
UPDATE rota.job j SET
  dispatch_failures = counted.failures, dispatch_error = $2::text,
  reason = CASE WHEN counted.failures >= $5::integer AND j.ends_as IS NULL THEN 'dispatch_failed' ELSE j.reason END,
  ts_dispatch_retry = CASE WHEN j.ts_dispatch_retry > clock_timestamp() THEN j.ts_dispatch_retry ELSE clock_timestamp()
    + interval '1 second' * least($3::float8 * power(2, least(counted.failures - 1, 64)), $4::float8) END
FROM (SELECT pk_job, CASE
               WHEN coalesce(ts_dispatch_retry + interval '10 minutes' <= clock_timestamp(), true) THEN 1
               WHEN ts_dispatch_retry <= clock_timestamp() THEN least(dispatch_failures + 1, 32767)
               ELSE greatest(dispatch_failures, 1) END AS failures
      FROM rota.job WHERE pk_job = ANY ($1::uuid[]) ORDER BY pk_job FOR NO KEY UPDATE) AS counted
WHERE j.pk_job = counted.pk_job
RETURNING j.pk_job, j.dispatch_failures

-- name: frame_ends_add
-- Store the outputs of attempts, or why they failed.
INSERT INTO rota.frame_end
  (pk_layer, frame, attempt, token, state, value, value_at, code, error, took_ms, pk_host, artifacts, output, checks)
SELECT e.layer, e.frame, e.attempt, e.token, e.state, e.value, e.value_at, e.code, e.error, e.took_ms, e.host,
       CASE WHEN e.artifacts <> '' THEN string_to_array(e.artifacts, E'\n') END, e.output, e.checks
FROM unnest($1::uuid[], $2::integer[], $3::smallint[], $4::bigint[], $5::text[], $6::bytea[], $7::text[], $8::text[],
            $9::text[], $10::integer[], $11::uuid[], $12::text[], $13::text[], $14::jsonb[])
  AS e (layer, frame, attempt, token, state, value, value_at, code, error, took_ms, host, artifacts, output, checks)

-- name: frame_failures
-- How often each frame has failed before, and how often its worker was lost.
SELECT e.pk_layer, e.frame, count(*) FILTER (WHERE e.code <> 'worker_lost') AS failed,
       count(*) FILTER (WHERE e.code = 'worker_lost') AS lost
FROM unnest($1::uuid[], $2::integer[]) AS a (layer, frame)
JOIN rota.frame_end e ON e.pk_layer = a.layer AND e.frame = a.frame WHERE e.state = 'RETRIED' GROUP BY 1, 2

-- name: frames_succeed
-- End frames without output: claims and bitmaps, the same as token ranges with a worker each, and the duration in ms.
SELECT what, claim_id, refused, pk_show, managed, fence, pk_alloc, pk_folder, pk_dept, cores, gpus, jobs, layers, tokens,
       topic, state, workflow_id
FROM rota.frames_succeed_each($1::uuid[], $2::bigint[], $3::varbit[], $4::bigint[], $5::bigint[], $6::bigint)

-- name: frames_succeed_with_results
-- As `frames_succeed`, with a result for each frame: tokens, values, pointers to values, and durations in ms.
SELECT what, claim_id, refused, pk_show, managed, fence, pk_alloc, pk_folder, pk_dept, cores, gpus, jobs, layers, tokens,
       topic, state, workflow_id
FROM rota.frames_succeed_with_results($1::uuid[], $2::bigint[], $3::varbit[], $4::bigint[], $5::bigint[], $6::bigint,
                                      $7::bigint[], $8::bytea[], $9::text[], $10::integer[])

-- name: job_end_as
-- Mark job $1 as ending in state $2 for reason $3, unless it is already ending; no row if there is no such live job.
UPDATE rota.job SET
  ends_as = coalesce(ends_as, $2::text), reason = CASE WHEN ends_as IS NULL THEN $3::text ELSE reason END, ts_updated = now()
WHERE pk_job = $1::uuid
RETURNING ends_as, state

-- name: jobs_finish
-- End those of the jobs $1 that have no open frame; $2 is an optional reason.
SELECT pk_job, pk_show, topic, state, workflow_id FROM rota.jobs_finish($1::uuid[], $2::text)

-- name: layers_count
-- Count $2 frames of layers $1 as ended in state $3, with a duration of $4 ms; returns the jobs whose layers have none
-- left.
SELECT rota.layers_count($1::uuid[], $2::integer[], $3::text, $4::bigint)

-- name: layers_for_ends
-- Retry settings of these layers, and whether their jobs are ending.
SELECT l.pk_layer, l.work, j.pk_job, j.ends_as, j.dispatch_failures, j.word
FROM rota.layer l JOIN rota.job j ON j.pk_job = l.pk_job WHERE l.pk_layer = ANY ($1::uuid[])

-- name: queues_of_layers
-- The queues of these layers.
SELECT DISTINCT queue FROM rota.layer WHERE pk_layer = ANY ($1::uuid[])

-- name: jobs_of_tokens
-- The jobs that these tokens are booked for.
SELECT DISTINCT pk_job FROM rota.proc WHERE token = ANY ($1::bigint[])

-- name: frames_held
-- Those of the tokens $1 with a proc, and their frames and workers.
SELECT token, pk_show, pk_job, pk_layer, pk_host FROM rota.proc WHERE token = ANY ($1::bigint[])
