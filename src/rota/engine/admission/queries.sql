-- name: approval_material
-- The stored submission of jobs $1, for the hash that people approve; one row for each layer.
SELECT j.pk_job, j.pk_show, j.pk_folder, j.pk_dept, j.str_name AS job_name, j.topic, j.priority, j.workflow_id, j.labels,
       j.request, j.state, j.ends_as, (extract(epoch FROM j.ts_run_at) * 1000000)::bigint AS run_at_us, l.number,
       l.str_name, l.work, l.input, l.input_at, l.first_frame, l.frame_step, l.frames, l.ranges, l.items, c.digest AS place
FROM rota.job j JOIN rota.layer l ON l.pk_job = j.pk_job
LEFT JOIN rota.queue_class q ON q.queue = l.queue LEFT JOIN rota.placement_class c ON c.class_id = q.class_id
WHERE j.pk_job = ANY ($1::uuid[])
ORDER BY j.pk_job, l.number

-- name: gatekeeper_deny
-- Mark those of the jobs $1 that wait for a decision as ending in state $2 for reasons $3 by policy decisions $4,
-- unless they are being terminated. Returns each of their layers with its number of frames. From here on no other
-- transaction ends them.
WITH given AS (
  SELECT * FROM unnest($1::uuid[], $3::text[], rota.policy_words($4::bytea[])) AS g (id, reason, word)
), held AS (
  SELECT j.pk_job FROM rota.job j
  WHERE j.pk_job = ANY ($1::uuid[]) AND j.state IN ('PENDING', 'APPROVAL_REQUIRED') AND j.ends_as IS NULL
  ORDER BY j.pk_job FOR UPDATE
), marked AS (
  UPDATE rota.job j
  SET ends_as = $2::text, reason = g.reason, word = coalesce(g.word, j.word), ts_updated = clock_timestamp()
  FROM held JOIN given g ON g.id = held.pk_job WHERE j.pk_job = held.pk_job RETURNING j.pk_job
)
SELECT l.pk_job, l.pk_layer, l.frames FROM marked JOIN rota.layer l ON l.pk_job = marked.pk_job ORDER BY l.pk_layer

-- name: gatekeeper_pending
-- Those of the jobs $1 that wait for a decision, with the input of the policy, and the current time.
SELECT j.pk_job AS id, coalesce(s.str_name, j.pk_show::text) AS show, coalesce(f.str_name, j.pk_folder::text) AS folder,
       coalesce(d.str_name, j.pk_dept::text) AS dept, j.topic, j.priority, j.reason, j.labels, j.request, j.workflow_id,
       l.works, l.requires, l.frames, l.input_bytes, clock_timestamp() AS now
FROM rota.job j
LEFT JOIN rota.show s USING (pk_show) LEFT JOIN rota.folder f USING (pk_folder) LEFT JOIN rota.dept d USING (pk_dept)
CROSS JOIN LATERAL (
  SELECT array_agg(l.work ORDER BY l.number) AS works, array_agg(l.frames ORDER BY l.number) AS frames,
         jsonb_agg(coalesce(c.requires, '{}') ORDER BY l.number) AS requires,
         array_agg(coalesce(length(l.input), split_part(l.input_at, ':', 3)::bigint, 0)
                   + (SELECT coalesce(sum(length(i)), 0) FROM unnest(l.items) AS i) ORDER BY l.number)::bigint[] AS input_bytes
  FROM rota.layer l
  LEFT JOIN rota.queue_class q ON q.queue = l.queue
  LEFT JOIN rota.placement_class c ON c.class_id = q.class_id
  WHERE l.pk_job = j.pk_job
) AS l
WHERE j.pk_job = ANY ($1::uuid[]) AND j.state = 'PENDING' AND j.ends_as IS NULL
  AND j.reason IS DISTINCT FROM 'waiting_on_job' AND l.works IS NOT NULL
ORDER BY j.pk_job

-- name: replay_approvals
-- Jobs after $2 that have waited for an approval for $1 seconds, by id; at most $3.
SELECT pk_job FROM rota.job
WHERE state = 'APPROVAL_REQUIRED' AND ends_as IS NULL AND ts_updated < clock_timestamp() - make_interval(secs => $1::float8)
  AND pk_job > $2::uuid
ORDER BY pk_job LIMIT $3::integer

-- name: replay_orphans
-- PENDING jobs unchanged for $1 seconds with no reason or one of $2; oldest first, at most $3.
SELECT pk_job FROM rota.job
WHERE state = 'PENDING' AND ends_as IS NULL AND ts_updated < clock_timestamp() - make_interval(secs => $1::float8)
  AND (reason IS NULL OR reason = ANY ($2::text[]))
ORDER BY ts_updated LIMIT $3::integer

-- name: replay_waiting
-- PENDING jobs that are due for a retry of the policy, longest overdue first; at most $1.
SELECT pk_job FROM rota.job
WHERE ts_ask_at <= clock_timestamp() AND state = 'PENDING' AND ends_as IS NULL
ORDER BY ts_ask_at LIMIT $1::integer

-- name: policy_seen
-- The jobs $1, live or done, as the policy sees them, each with its decision.
SELECT j.pk_job AS id, coalesce(s.str_name, j.pk_show::text) AS show, coalesce(f.str_name, j.pk_folder::text) AS folder,
       coalesce(d.str_name, j.pk_dept::text) AS dept, j.topic, j.priority, j.labels, j.request, j.workflow_id,
       l.works, l.requires, l.frames, l.input_bytes, w.told
FROM (
  SELECT pk_job, pk_show, pk_folder, pk_dept, topic, priority, labels, request, workflow_id, word, NULL::rota.layer[] AS layers
  FROM rota.job WHERE pk_job = ANY ($1::uuid[])
  UNION ALL
  SELECT pk_job, pk_show, pk_folder, pk_dept, topic, priority, labels, request, workflow_id, word, layers
  FROM rota.job_done WHERE pk_job = ANY ($1::uuid[])
) AS j
LEFT JOIN rota.show s USING (pk_show) LEFT JOIN rota.folder f USING (pk_folder) LEFT JOIN rota.dept d USING (pk_dept)
LEFT JOIN rota.policy_word w USING (word)
CROSS JOIN LATERAL (
  SELECT array_agg(l.work ORDER BY l.number) AS works, array_agg(l.frames ORDER BY l.number) AS frames,
         jsonb_agg(coalesce(c.requires, '{}') ORDER BY l.number) AS requires,
         array_agg(coalesce(length(l.input), split_part(l.input_at, ':', 3)::bigint, 0)
                   + (SELECT coalesce(sum(length(i)), 0) FROM unnest(l.items) AS i) ORDER BY l.number)::bigint[] AS input_bytes
  FROM (
    SELECT * FROM rota.layer WHERE pk_job = j.pk_job AND j.layers IS NULL
    UNION ALL
    SELECT * FROM unnest(j.layers)
  ) AS l
  LEFT JOIN rota.queue_class q ON q.queue = l.queue
  LEFT JOIN rota.placement_class c ON c.class_id = q.class_id
) AS l
WHERE l.works IS NOT NULL
ORDER BY j.pk_job DESC

-- name: policy_since
-- Ids of the $2 newest jobs before $1 that were submitted within the last $3 seconds.
SELECT pk_job AS id FROM rota.jobs_before(NULL, $1::uuid, $2::int)
WHERE ts_submitted > now() - make_interval(secs => $3::float8) ORDER BY pk_job DESC

-- name: gate_now
-- The clock of PostgreSQL.
SELECT clock_timestamp() AS now

-- name: gate_lock
-- Lock jobs $1 against other decisions until the transaction ends.
SELECT pk_job FROM rota.job WHERE pk_job = ANY ($1::uuid[]) AND state = 'PENDING' ORDER BY pk_job FOR UPDATE

-- name: gate_wait
-- PENDING jobs $1 to states $2 (PENDING or APPROVAL_REQUIRED) for reasons $3 by policy decisions $4; returns those
-- that were PENDING.
-- A job that stays PENDING is retried after $5 seconds; 0: one second, doubling each time, up to 30.
WITH given AS (
  SELECT * FROM unnest($1::uuid[], $2::text[], $3::text[], rota.policy_words($4::bytea[]), $5::float8[])
    AS g (id, state, reason, word, wait_s)
), held AS (
  SELECT j.pk_job FROM rota.job j WHERE j.pk_job = ANY ($1) AND j.state = 'PENDING' ORDER BY j.pk_job FOR UPDATE
)
UPDATE rota.job j
SET state = g.state, reason = g.reason, ts_updated = clock_timestamp(), word = coalesce(g.word, j.word),
    asks = CASE WHEN g.state = 'PENDING' AND g.wait_s = 0 THEN least(coalesce(j.asks, 0) + 1, 100) END,
    ts_ask_at = CASE WHEN g.state = 'PENDING' THEN clock_timestamp() + make_interval(secs =>
      CASE WHEN g.wait_s > 0 THEN g.wait_s ELSE least(30, 2 ^ least(coalesce(j.asks, 0), 10)) END) END,
    history = CASE WHEN (j.state, j.reason) IS NOT DISTINCT FROM (g.state, g.reason) THEN j.history ELSE j.history ||
      jsonb_build_array(jsonb_build_array(g.state, floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint, g.reason)) END
FROM held JOIN given g ON g.id = held.pk_job WHERE j.pk_job = held.pk_job
RETURNING j.pk_job AS id

-- name: submit_admit
-- Jobs $1 from PENDING to SCHEDULED with their queue entries, by policy decisions $2, unless it is past $3; returns
-- those admitted.
SELECT admitted AS id FROM rota.job_admit($1::uuid[], $2::bytea[], $3::timestamptz) AS admitted

-- name: submit_hold
-- Jobs $1 from state $2 to state $3 for the reason $4, without queueing; returns those that were in that state.
WITH held AS (
  SELECT pk_job FROM rota.job WHERE pk_job = ANY ($1::uuid[]) AND state = $2::text ORDER BY pk_job FOR UPDATE
)
UPDATE rota.job j
SET state = $3::text, reason = $4::text, ts_updated = clock_timestamp(),
    history = CASE WHEN (j.state, j.reason) IS NOT DISTINCT FROM ($3, $4) THEN j.history ELSE j.history ||
      jsonb_build_array(jsonb_build_array($3, floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint, $4)) END
FROM held WHERE j.pk_job = held.pk_job
RETURNING j.pk_job AS id
