-- name: prune_runs
-- Delete up to $2 runs that ended more than $1 seconds ago, as did their root run, with all their rows; returns how
-- many.
WITH old AS MATERIALIZED (
  SELECT r.pk_run FROM rota.workflow_run r
  WHERE r.ts_ended < clock_timestamp() - make_interval(secs => $1::float8)
    AND NOT EXISTS (
      SELECT FROM rota.workflow_run o WHERE o.pk_run = r.pk_root
      AND (o.ts_ended IS NULL OR o.ts_ended >= clock_timestamp() - make_interval(secs => $1::float8)))
    AND NOT EXISTS (SELECT FROM rota.saga s WHERE s.pk_show = r.pk_show AND s.workflow_id = r.pk_root::text)
  ORDER BY r.ts_ended LIMIT $2::int FOR UPDATE SKIP LOCKED
), events AS (DELETE FROM rota.workflow_event e USING old WHERE e.pk_run = old.pk_run
), outputs AS (DELETE FROM rota.workflow_value v USING old WHERE v.pk_run = old.pk_run
), timers AS (DELETE FROM rota.workflow_timer t USING old WHERE t.pk_run = old.pk_run
), gone AS (DELETE FROM rota.workflow_run r USING old WHERE r.pk_run = old.pk_run RETURNING 1)
SELECT count(*) FROM gone

-- name: prune_sagas
-- Delete up to $2 sagas that ended more than $1 seconds ago; returns how many.
WITH gone AS (
  DELETE FROM rota.saga s USING (
    SELECT o.pk_saga FROM rota.saga o
    WHERE o.ts_ended < clock_timestamp() - make_interval(secs => $1::float8) AND o.state IN ('rolled_back', 'incomplete')
    ORDER BY o.ts_ended LIMIT $2::int FOR UPDATE SKIP LOCKED
  ) AS old WHERE s.pk_saga = old.pk_saga RETURNING 1
)
SELECT count(*) FROM gone

-- name: prune_versions
-- Delete up to $2 versions of definitions older than $1 seconds that are neither the latest nor in use; returns how
-- many.
WITH gone AS (
  DELETE FROM rota.workflow w USING (
    SELECT o.pk_workflow FROM rota.workflow o
    WHERE o.ts_created < clock_timestamp() - make_interval(secs => $1::float8)
      AND EXISTS (SELECT FROM rota.workflow n WHERE n.pk_show = o.pk_show AND n.name = o.name AND n.version > o.version)
      AND NOT EXISTS (SELECT FROM rota.workflow_run r WHERE r.pk_workflow = o.pk_workflow)
    ORDER BY o.pk_workflow LIMIT $2::int FOR UPDATE SKIP LOCKED
  ) AS old WHERE w.pk_workflow = old.pk_workflow RETURNING 1
)
SELECT count(*) FROM gone

-- name: mend_ended
-- How the runs $1 ended, as far as they exist.
SELECT pk_run, state, error, steps FROM rota.workflow_run WHERE pk_run = ANY ($1::uuid[])

-- name: mend_jobs
-- Deliver the ends of jobs $3 to runs $1 in shows $2 again; a missing job counts as failed.
INSERT INTO rota.workflow_news (kind, workflow_id, pk_show, pk_job, state, reason, pk_layer, frames, request, ts_at)
SELECT 'job', g.pk_run::text, g.pk_show, g.pk_job, coalesce(d.state, 'FAILED'),
       CASE WHEN d.pk_job IS NULL THEN 'Its job is gone, and nothing is known of its end.' ELSE d.reason END,
       d.layers[1].pk_layer, coalesce(d.layers[1].frames, 1), d.request, coalesce(d.ts_finished, clock_timestamp())
FROM unnest($1::uuid[], $2::uuid[], $3::uuid[]) AS g (pk_run, pk_show, pk_job)
LEFT JOIN LATERAL (SELECT * FROM rota.job_done d WHERE d.pk_job = g.pk_job LIMIT 1) AS d ON true

-- name: mend_lock
-- Lock those of the runs $1 that still have the fences $2; skips locked runs.
SELECT r.pk_run FROM rota.workflow_run r JOIN unnest($1::uuid[], $2::bigint[]) AS g (pk_run, fence) USING (pk_run, fence)
WHERE r.ts_ended IS NULL ORDER BY r.pk_run FOR NO KEY UPDATE OF r SKIP LOCKED

-- name: mend_runs
-- Up to $2 live runs after run $1, with their timers, and whether a saga that they wait for is missing or has ended.
SELECT r.pk_run, r.pk_show, r.pk_workflow, r.state, r.steps, r.fence, t.places, t.attempts,
       r.state = 'COMPENSATING'
         AND NOT EXISTS (SELECT FROM rota.saga s WHERE s.pk_show = r.pk_show AND s.workflow_id = r.pk_run::text
                         AND s.state = 'rolling_back')
         AND NOT EXISTS (SELECT FROM rota.workflow_news n WHERE n.kind = 'saga' AND n.workflow_id = r.pk_run::text)
         AS is_undone
FROM rota.workflow_run r LEFT JOIN LATERAL (
  SELECT array_agg(t.place) AS places, array_agg(t.attempt) AS attempts
  FROM rota.workflow_timer t WHERE t.pk_run = r.pk_run
) AS t ON true
WHERE r.ts_ended IS NULL AND r.pk_run > $1::uuid ORDER BY r.pk_run LIMIT $2::int

-- name: mend_timers
-- Insert the missing timers $1 to $4 (runs, places, attempts, milliseconds).
INSERT INTO rota.workflow_timer (pk_run, place, attempt, ts_due)
SELECT g.pk_run, g.place, g.attempt, to_timestamp(g.due_ms / 1000.0)
FROM unnest($1::uuid[], $2::smallint[], $3::int[], $4::bigint[]) AS g (pk_run, place, attempt, due_ms)
ON CONFLICT DO NOTHING

-- name: mend_told
-- Add inbox messages of kind $3 to runs $1 in shows $2: ids $4, states $5, reasons $6, triggers $7.
INSERT INTO rota.workflow_news (kind, workflow_id, pk_show, pk_job, state, reason, request)
SELECT g.kind, g.pk_run::text, g.pk_show, g.id, g.state, g.reason, convert_to(g.way, 'UTF8')
FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::uuid[], $5::text[], $6::text[], $7::text[])
  AS g (pk_run, pk_show, kind, id, state, reason, way)

-- name: mend_undos
-- Deliver up to $1 lost ends of compensations again; an entry that was never submitted is due again.
WITH lost AS (
  SELECT s.pk_show, s.workflow_id, e.pk_saga, e.number, e.pk_undo
  FROM rota.saga s JOIN rota.saga_entry e USING (pk_saga)
  WHERE s.state = 'rolling_back' AND e.state = 'running'
    AND NOT EXISTS (SELECT FROM rota.job j WHERE j.pk_job = e.pk_undo)
    AND NOT EXISTS (SELECT FROM rota.workflow_news n WHERE n.pk_job = e.pk_undo)
  ORDER BY s.pk_saga LIMIT $1::int FOR NO KEY UPDATE OF s SKIP LOCKED
), again AS (
  UPDATE rota.saga_entry e SET state = 'pending', ts_changed = clock_timestamp()
  FROM lost l WHERE e.pk_saga = l.pk_saga AND e.number = l.number AND l.pk_undo IS NULL
), told AS (
  INSERT INTO rota.workflow_news (kind, workflow_id, pk_show, pk_job, state, reason, pk_layer, frames, request, ts_at)
  SELECT 'undo', l.workflow_id, l.pk_show, l.pk_undo, coalesce(d.state, 'FAILED'),
         CASE WHEN d.pk_job IS NULL THEN 'Its job is gone, and nothing is known of its end.' ELSE d.reason END,
         d.layers[1].pk_layer, coalesce(d.layers[1].frames, 1), d.request, coalesce(d.ts_finished, clock_timestamp())
  FROM lost l LEFT JOIN LATERAL (SELECT * FROM rota.job_done d WHERE d.pk_job = l.pk_undo LIMIT 1) AS d ON true
  WHERE l.pk_undo IS NOT NULL
)
SELECT pk_show, workflow_id, pk_undo FROM lost

-- name: mend_unheard
-- Which of the jobs $1, runs $2 and approvals $3 that steps wait for have ended, or are missing, without an inbox
-- message.
WITH told AS MATERIALIZED (SELECT pk_job FROM rota.workflow_news WHERE pk_job IS NOT NULL)
SELECT 'job' AS kind, g.id FROM unnest($1::uuid[]) AS g (id)
WHERE NOT EXISTS (SELECT FROM rota.job j WHERE j.pk_job = g.id) AND g.id NOT IN (SELECT pk_job FROM told)
UNION ALL
SELECT 'run', g.id FROM unnest($2::uuid[]) AS g (id)
WHERE NOT EXISTS (SELECT FROM rota.workflow_run r WHERE r.pk_run = g.id AND r.ts_ended IS NULL)
  AND g.id NOT IN (SELECT pk_job FROM told)
UNION ALL
SELECT 'approval', g.id FROM unnest($3::uuid[]) AS g (id)
WHERE NOT EXISTS (SELECT FROM rota.approval a WHERE a.pk_approval = g.id AND a.state = 'pending')
  AND g.id NOT IN (SELECT pk_job FROM told)
