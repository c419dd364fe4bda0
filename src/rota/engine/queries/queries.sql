-- name: frames_on_workers
-- Procs of job $1, at most $2.
SELECT p.token, p.pk_layer, p.pk_host AS worker_id, coalesce(w.str_name, p.pk_host::text) AS worker,
       p.ts_booked AS since
FROM rota.proc p LEFT JOIN rota.worker w USING (pk_host)
WHERE p.pk_job = $1::uuid AND NOT p.b_ended ORDER BY p.token LIMIT $2::integer

-- name: jobs_artifacts
-- Artifacts of frames of layer $1, from frame $2 on; of the last attempt, if it succeeded and is readable.
SELECT frame, attempt, artifacts FROM (
  SELECT DISTINCT ON (frame) frame, attempt, state, artifacts, output FROM rota.frame_end
  WHERE pk_layer = $1::uuid AND frame >= $2::int AND state NOT IN ('RETRIED', 'RETURNED')
  ORDER BY frame, attempt DESC, ts_finished DESC
) AS last
WHERE state = 'SUCCEEDED' AND artifacts IS NOT NULL AND rota.output_readable(output)
ORDER BY frame LIMIT $3::int

-- name: jobs_artifacts_sum
-- Number and total bytes of the artifacts of layers $1.
SELECT count(*) AS files, coalesce(sum(split_part(split_part(word, ' ', 1), ':', 3)::bigint), 0)::bigint AS bytes
FROM rota.frame_end, unnest(artifacts) AS word
WHERE pk_layer = ANY ($1::uuid[]) AND state = 'SUCCEEDED' AND word ~ '^(pg|file):[0-9a-f]{64}:[0-9]{1,13} '

-- name: jobs_ends
-- How frames of layer $1 ended, from frame $2 on; retried attempts do not count.
-- Value and artifacts are readable by everyone or withheld: see rota.model.policy.outputs.read_refusal.
SELECT DISTINCT ON (frame) frame, attempt, token, state, code, error, took_ms, pk_host AS worker, output,
       CASE WHEN rota.output_readable(output) THEN value END AS value,
       CASE WHEN rota.output_readable(output) THEN value_at END AS value_at,
       CASE WHEN rota.output_readable(output) THEN artifacts END AS artifacts,
       coalesce(ts_ended, ts_finished) AS finished_at
FROM rota.frame_end WHERE pk_layer = $1::uuid AND frame >= $2::int AND state NOT IN ('RETRIED', 'RETURNED')
ORDER BY frame, attempt DESC, ts_finished DESC LIMIT $3::int

-- name: jobs_get
-- Jobs by id, live or done; a job that ends meanwhile is found once.
SELECT j.pk_job AS id, coalesce(s.str_name, j.pk_show::text) AS show, coalesce(f.str_name, j.pk_folder::text) AS folder,
       coalesce(d.str_name, j.pk_dept::text) AS dept, j.str_name AS name, j.topic, j.priority, j.state, j.reason,
       j.labels, j.request, j.workflow_id, j.ts_submitted AS submitted_at, j.ts_deadline AS deadline_at,
       j.ts_wait_until AS wait_until, j.ts_run_at AS run_at, j.ts_finished AS finished_at,
       rota.job_history_shown(j.history, j.state, j.ts_submitted, j.ts_finished) AS history, j.layers, w.told AS policy
FROM (
  SELECT pk_job, pk_show, pk_folder, pk_dept, str_name, topic, priority, state, reason, labels, request, workflow_id,
         ts_submitted, ts_deadline, ts_wait_until, ts_run_at, NULL::timestamptz AS ts_finished, history, word,
         (SELECT jsonb_agg(rota.layer_shown(l) ORDER BY l.number) FROM rota.layer l WHERE l.pk_job = job.pk_job)
           AS layers
  FROM rota.job WHERE pk_job = ANY ($1::uuid[])
  UNION ALL
  SELECT pk_job, pk_show, pk_folder, pk_dept, str_name, topic, priority, state, reason, labels, request, workflow_id,
         ts_submitted, ts_deadline, NULL, NULL, ts_finished, history, word,
         (SELECT jsonb_agg(rota.layer_shown(l) ORDER BY l.number) FROM unnest(layers) AS l)
  FROM rota.job_done WHERE pk_job = ANY ($1::uuid[])
) AS j
LEFT JOIN rota.show s USING (pk_show) LEFT JOIN rota.folder f USING (pk_folder) LEFT JOIN rota.dept d USING (pk_dept)
LEFT JOIN rota.policy_word w USING (word)

-- name: jobs_kept
-- Frames of layer $1, from frame $2 on, whose outputs are withheld, at most $3; with $4, those with that artifact.
SELECT frame, output FROM (
  SELECT DISTINCT ON (frame) frame, output, artifacts FROM rota.frame_end
  WHERE pk_layer = $1::uuid AND frame >= $2::int AND state NOT IN ('RETRIED', 'RETURNED')
  ORDER BY frame, attempt DESC, ts_finished DESC
) AS last
WHERE NOT rota.output_readable(output)
  AND ($4::text IS NULL OR EXISTS (SELECT FROM unnest(artifacts) AS word WHERE split_part(word, ' ', 1) = $4))
ORDER BY frame LIMIT $3::int

-- name: jobs_list
-- Of the $8 newest jobs before id $7, the first $9 that match the filters.
-- A last row without an id has in `before` where the scan ended; null at the end of the list.
-- Filters, null for any: shows $1, state $2, topic $3, reason $4, label $5 with value $6.
WITH looked AS MATERIALIZED (
  SELECT * FROM rota.jobs_before($1::uuid[], $7::uuid, $8::int)
), agreeing AS MATERIALIZED (
  SELECT * FROM looked
  WHERE ($2::text IS NULL OR state = $2) AND ($3::text IS NULL OR topic = $3) AND ($4::text IS NULL OR reason = $4)
    AND ($5::text IS NULL OR labels ->> $5 = $6::text)
  ORDER BY pk_job DESC LIMIT $9::int
)
SELECT j.pk_job AS id, coalesce(s.str_name, j.pk_show::text) AS show, j.str_name AS name, j.topic, j.priority, j.state,
       j.reason, j.labels::text AS labels, j.ts_submitted AS submitted_at, j.ts_finished AS finished_at,
       l.frames, l.succeeded, l.ended, NULL::uuid AS before
FROM agreeing j
LEFT JOIN rota.show s USING (pk_show)
CROSS JOIN LATERAL (
  SELECT coalesce(sum(frames), 0)::bigint AS frames, coalesce(sum(succeeded), 0)::bigint AS succeeded,
         coalesce(sum(succeeded + quarantined + failed + timed_out + cancelled + denied), 0)::bigint AS ended
  FROM (
    SELECT frames, succeeded, quarantined, failed, timed_out, cancelled, denied
    FROM rota.layer WHERE pk_job = j.pk_job AND j.layers IS NULL
    UNION ALL
    SELECT frames, succeeded, quarantined, failed, timed_out, cancelled, denied FROM unnest(j.layers)
  ) AS each
) AS l
UNION ALL
SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
       CASE WHEN (SELECT count(*) FROM looked) = $8 THEN (SELECT pk_job FROM looked ORDER BY pk_job LIMIT 1) END
ORDER BY 1 DESC NULLS LAST

-- name: jobs_running
-- Booked frames of each layer of job $1.
SELECT pk_layer, count(*) AS frames FROM rota.proc WHERE pk_job = $1::uuid AND NOT b_ended GROUP BY pk_layer

-- name: jobs_show
-- The id of the show named $1.
SELECT pk_show FROM rota.show WHERE str_name = $1::text

-- name: logs_add
-- Store log chunks.
INSERT INTO rota.frame_log (pk_layer, frame, attempt, token, stream, at, dropped, data, last)
SELECT * FROM unnest($1::uuid[], $2::integer[], $3::smallint[], $4::bigint[], $5::text[], $6::bigint[], $7::bigint[],
                     $8::bytea[], $9::boolean[])

-- name: logs_read
-- Log chunks, at most $6, of frame $2 of layer $1 that reach beyond offset $5; of attempt $3 (null: the last with a
-- log), in stream $4 (null: all of them). No rows while the output is withheld.
SELECT g.attempt, g.stream, g.at, g.dropped, g.data, g.last FROM rota.frame_log g
WHERE g.pk_layer = $1::uuid AND g.frame = $2::integer AND ($4::text IS NULL OR g.stream = $4)
  AND (g.at + length(g.data) > $5::bigint OR g.last)
  AND g.token = (SELECT max(l.token) FROM rota.frame_log l
                 WHERE l.pk_layer = $1 AND l.frame = $2 AND ($3::integer IS NULL OR l.attempt = $3))
  AND NOT EXISTS (SELECT FROM rota.frame_end e
                  WHERE e.pk_layer = $1 AND e.frame = $2 AND e.token = g.token AND NOT rota.output_readable(e.output))
ORDER BY g.stream, g.at, length(g.data) DESC LIMIT $6::integer

-- name: queues_owned
-- Show and topic of each queue.
SELECT q.queue, q.pk_show, s.str_name AS show, c.topic
FROM rota.queue_class q JOIN rota.show s USING (pk_show) JOIN rota.placement_class c USING (class_id)

-- name: workers_list
-- Workers that are up, or all that are stored ($1), with their procs.
SELECT w.pk_host AS id, w.str_name AS name, w.pool, w.state, w.hello, w.heartbeat_s, w.ts_up AS up_at, w.ts_ended AS ended_at,
       coalesce(p.frames, 0)::bigint AS frames, coalesce(p.cores, 0)::bigint AS cores,
       coalesce(p.gpus, 0)::bigint AS gpus, coalesce(p.memory_mb, 0)::bigint AS memory_mb,
       coalesce(p.jobs, 0)::bigint AS jobs
FROM rota.worker w
LEFT JOIN (
  SELECT b.pk_host, sum(b.frames) AS frames, sum(b.cores) AS cores, sum(b.gpus) AS gpus, count(DISTINCT b.pk_job) AS jobs,
         sum(b.slots * coalesce(c.memory_mb, 0)) AS memory_mb
  FROM (SELECT pk_host, pk_job, pk_layer, count(*) FILTER (WHERE NOT b_ended) AS frames,
               count(*) FILTER (WHERE int_cores_reserved > 0 OR int_gpus_reserved > 0) AS slots,
               sum(int_cores_reserved) AS cores, sum(int_gpus_reserved) AS gpus
        FROM rota.proc GROUP BY 1, 2, 3) AS b
  LEFT JOIN rota.layer l USING (pk_layer)
  LEFT JOIN rota.queue_class q ON q.queue = l.queue
  LEFT JOIN rota.placement_class c USING (class_id)
  GROUP BY b.pk_host
) AS p USING (pk_host)
WHERE $1::boolean OR w.state = 'up'
ORDER BY w.state = 'up' DESC, w.pool, w.str_name, w.ts_up LIMIT 10000
