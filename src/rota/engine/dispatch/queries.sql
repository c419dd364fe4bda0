-- name: layers_to_run
-- What the frames of layers $1 execute, for jobs that are live.
SELECT pk_layer, frames, first_frame, frame_step, work, input, input_at, int_layers, ends_as, word, capped
FROM rota.layers_to_run($1::uuid[])

-- name: tenant_let_in
-- Those of the jobs $2 of show $1, in the given order, that may run.
SELECT rota.jobs_let_in($1::uuid, $2::uuid[])

-- name: tenant_limit_passed
-- Removes the reason tenant_limit from jobs whose frames are no longer parked: what keeps them waiting is something else.
-- A reason younger than a second is kept, because its frames are parked right after it is written.
UPDATE rota.job j SET reason = NULL, ts_updated = clock_timestamp()
FROM (SELECT w.pk_job FROM rota.job w
      WHERE w.reason = 'tenant_limit' AND w.ends_as IS NULL AND w.ts_updated < clock_timestamp() - interval '1 s'
        AND NOT EXISTS (SELECT FROM rota.queue_returned r WHERE r.parked_job = w.pk_job)
      LIMIT 500 FOR NO KEY UPDATE SKIP LOCKED) AS passed
WHERE j.pk_job = passed.pk_job

-- name: jobs_parked
-- Jobs that wait for their own cap or their show's limit, and about how many of their frames fit by now.
SELECT w.pk_job, w.room FROM (
  SELECT j.pk_job, j.pk_show, least(nullif(s.int_max_jobs, -1), word.jobs_max) AS jobs_max, slot.pk_job IS NOT NULL AS let_in,
         row_number() OVER (PARTITION BY j.pk_show, slot.pk_job IS NULL ORDER BY j.priority DESC, j.pk_job) AS turn,
         CASE
           WHEN r.pk_job IS NULL THEN p.n
           WHEN used.frames IS NULL THEN p.n
           WHEN r.int_max_cores > 0 AND used.cores > 0 THEN (r.int_max_cores - used.cores) / (used.cores / used.frames)
           WHEN r.int_max_gpus > 0 AND used.gpus > 0 THEN (r.int_max_gpus - used.gpus) / (used.gpus / used.frames)
           ELSE 1 END AS room
  FROM (SELECT parked_job AS job, sum(n)::bigint AS n FROM rota.queue_returned WHERE parked_job IS NOT NULL
        GROUP BY 1) AS p
  JOIN rota.job j ON j.pk_job = p.job AND j.ends_as IS NULL
  LEFT JOIN rota.show s ON s.pk_show = j.pk_show
  LEFT JOIN rota.policy_word word ON word.word = j.word
  LEFT JOIN rota.job_slot slot ON slot.pk_job = j.pk_job
  LEFT JOIN rota.job_resource r ON r.pk_job = p.job
  LEFT JOIN (SELECT pk_job, count(*) FILTER (WHERE int_cores_reserved > 0 OR int_gpus_reserved > 0) AS frames,
                    sum(int_cores_reserved)::bigint AS cores,
                    sum(int_gpus_reserved)::bigint AS gpus
             FROM rota.proc WHERE pk_job IN (SELECT parked_job FROM rota.queue_returned WHERE parked_job IS NOT NULL)
             GROUP BY 1) AS used ON used.pk_job = p.job
) AS w
WHERE w.jobs_max IS NULL OR w.let_in
  OR w.turn <= w.jobs_max - (SELECT rota.job_slots_used(w.pk_show))
LIMIT 500

-- name: queue_classes
-- Requirements of these queues (null: of all).
SELECT q.queue, q.pk_show, q.pk_folder, q.pk_dept, c.class_id, c.topic, c.requires, c.labels, c.preferred_pool,
       c.preferred_worker, c.cores, c.gpus, c.memory_mb
FROM rota.queue_class q JOIN rota.placement_class c ON c.class_id = q.class_id
WHERE $1::text[] IS NULL OR q.queue = ANY ($1)

-- name: shares
-- Each show's size in each pool, and the cores in use there.
SELECT s.pk_show, s.pk_alloc, s.int_size AS size, coalesce(p.cores, 0)::bigint AS used
FROM rota.subscription s
LEFT JOIN (SELECT pk_show, pk_alloc, sum(int_cores_reserved) AS cores FROM rota.proc GROUP BY 1, 2) AS p
  ON p.pk_show = s.pk_show AND p.pk_alloc = s.pk_alloc

-- name: waiting_limits
-- Shows with a limit on concurrent jobs, of their own or from the policy decision of one of their jobs; whether frames
-- are parked, and whether there are minimums.
SELECT ARRAY(
         SELECT pk_show FROM rota.show WHERE int_max_jobs >= 0
         UNION SELECT pk_show FROM rota.job WHERE reason = 'tenant_limit'
         UNION SELECT s.pk_show FROM rota.job_slot s
         JOIN rota.job j ON j.pk_job = s.pk_job JOIN rota.policy_word w ON w.word = j.word AND w.jobs_max IS NOT NULL
       ) AS limited,
       EXISTS (SELECT FROM rota.queue_returned WHERE parked_job IS NOT NULL) AS parked,
       EXISTS (SELECT FROM rota.folder_resource WHERE int_min_cores > 0 OR int_min_gpus > 0)
         OR EXISTS (SELECT FROM rota.point WHERE int_min_cores > 0 OR int_min_gpus > 0) AS minimums

-- name: minimums
-- Minimums of folders and departments, and what is in use of each.
SELECT m.pk_show, m.key, m.int_min_cores AS min_cores, m.int_min_gpus AS min_gpus,
       coalesce(p.cores, 0)::bigint AS cores, coalesce(p.gpus, 0)::bigint AS gpus
FROM (
  SELECT pk_show, pk_folder AS key, true AS of_folder, int_min_cores, int_min_gpus FROM rota.folder_resource
  WHERE int_min_cores > 0 OR int_min_gpus > 0
  UNION ALL
  SELECT pk_show, pk_dept, false, int_min_cores, int_min_gpus FROM rota.point
  WHERE int_min_cores > 0 OR int_min_gpus > 0
) AS m
CROSS JOIN LATERAL (
  SELECT sum(p.int_cores_reserved) AS cores, sum(p.int_gpus_reserved) AS gpus FROM rota.proc p
  WHERE p.pk_show = m.pk_show AND CASE WHEN m.of_folder THEN p.pk_folder ELSE p.pk_dept END = m.key
) AS p

-- name: jobs_mark
-- Set jobs $1 to state $2 (DISPATCHED, or RUNNING) as of $3 (ms) each; jobs that are further along stay. A job that is
-- being ended keeps the reason of its end.
-- Never waits for row locks: a locked job is returned without a topic and may be written later.
WITH free AS MATERIALIZED (
  SELECT j.pk_job FROM rota.job j WHERE j.pk_job = ANY ($1::uuid[]) FOR NO KEY UPDATE SKIP LOCKED
), marked AS (
  UPDATE rota.job j SET
    state = $2::text, ts_updated = now(), reason = CASE WHEN j.ends_as IS NOT NULL THEN j.reason END, ts_wait_until = NULL,
    history = j.history || CASE WHEN $2 = 'RUNNING' AND j.state = 'SCHEDULED'
                                THEN jsonb_build_array(jsonb_build_array('DISPATCHED', m.at_ms, NULL)) ELSE '[]' END
                        || jsonb_build_array(jsonb_build_array($2::text, m.at_ms, NULL))
  FROM unnest($1::uuid[], $3::bigint[]) AS m (pk_job, at_ms) JOIN free USING (pk_job)
  WHERE j.pk_job = m.pk_job AND (j.state = 'SCHEDULED' OR $2 = 'RUNNING' AND j.state = 'DISPATCHED')
  RETURNING j.pk_job, j.pk_show, j.topic, (extract(epoch FROM j.ts_submitted) * 1000)::bigint AS submitted_ms
)
SELECT pk_job, pk_show, topic, submitted_ms FROM marked
UNION ALL
SELECT j.pk_job, NULL, NULL, NULL FROM rota.job j
WHERE j.pk_job = ANY ($1::uuid[]) AND NOT EXISTS (SELECT FROM free WHERE free.pk_job = j.pk_job)
