-- name: reopen_denied
-- The policy decision that denied job $1; no row when it was not denied.
SELECT word FROM rota.job_done WHERE pk_job = $1::uuid AND state = 'DENIED' LIMIT 1

-- name: reopen_jobs
-- Jobs $1, live or done, with everything needed to submit them again; a row for each layer.
SELECT j.pk_job, j.live, s.str_name AS show, f.str_name AS folder, d.str_name AS dept, j.str_name AS name, j.topic,
       j.priority, j.labels, j.request, j.workflow_id, l.pk_layer, l.number, l.str_name AS layer, l.queue, l.work, l.input,
       l.input_at, l.first_frame, l.frame_step, l.ranges, l.frames, c.digest, c.topic AS place_topic, c.requires,
       c.labels AS place_labels, c.preferred_pool, c.preferred_worker, c.cores, c.gpus, c.memory_mb,
       coalesce(jr.int_max_cores, (j.caps -> j.pk_job::text ->> 0)::bigint) AS job_cores,
       coalesce(jr.int_max_gpus, (j.caps -> j.pk_job::text ->> 1)::bigint) AS job_gpus,
       coalesce(lr.int_max_cores, (j.caps -> l.pk_layer::text ->> 0)::bigint) AS layer_cores,
       coalesce(lr.int_max_gpus, (j.caps -> l.pk_layer::text ->> 1)::bigint) AS layer_gpus
FROM (
  SELECT pk_job, pk_show, pk_folder, pk_dept, str_name, topic, priority, labels, request, workflow_id, true AS live,
         ARRAY(SELECT k FROM rota.layer k WHERE k.pk_job = job.pk_job) AS layers, NULL::jsonb AS caps
  FROM rota.job WHERE pk_job = ANY ($1::uuid[])
  UNION ALL
  SELECT pk_job, pk_show, pk_folder, pk_dept, str_name, topic, priority, labels, request, workflow_id, false, layers, caps
  FROM rota.job_done WHERE pk_job = ANY ($1::uuid[])
) AS j
CROSS JOIN LATERAL unnest(j.layers) AS l
LEFT JOIN rota.show s USING (pk_show) LEFT JOIN rota.folder f USING (pk_folder) LEFT JOIN rota.dept d USING (pk_dept)
LEFT JOIN rota.queue_class q ON q.queue = l.queue
LEFT JOIN rota.placement_class c ON c.class_id = q.class_id
LEFT JOIN rota.job_resource jr ON jr.pk_job = j.pk_job
LEFT JOIN rota.layer_resource lr ON lr.pk_layer = l.pk_layer
ORDER BY j.pk_job, l.number

-- name: reopen_known
-- Which of the queues $1 belong to the engine.
SELECT queue FROM rota.queue_class WHERE queue = ANY ($1::text[])

-- name: reopen_letters
-- Dead letters of frames by cause.
SELECT dlq_id AS id FROM rota.dlq_entries WHERE kind = 'frame' AND cause = ANY ($1::text[]) ORDER BY dlq_id
