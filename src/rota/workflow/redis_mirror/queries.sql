-- name: saga_mirror
-- The sagas $2 of shows $1, each with up to $3 of its remaining entries, the next one first; no fence: it has ended.
SELECT g.workflow_id, w.str_name AS show, s.fence, s.state, e.steps, e.jobs, e.states, e.templates,
       EXISTS (SELECT FROM rota.workflow_run r WHERE r.pk_show = g.pk_show
               AND r.pk_run = CASE WHEN rota.is_uuid(g.workflow_id) THEN g.workflow_id::uuid END) AS is_run
FROM unnest($1::uuid[], $2::text[]) AS g (pk_show, workflow_id)
JOIN rota.show w USING (pk_show)
LEFT JOIN rota.saga s ON s.pk_show = g.pk_show AND s.workflow_id = g.workflow_id AND s.state IN ('open', 'rolling_back')
LEFT JOIN LATERAL (
  SELECT array_agg(e.step) AS steps, array_agg(e.pk_job) AS jobs, array_agg(e.state) AS states,
         array_agg(e.template) AS templates
  FROM (SELECT * FROM rota.saga_entry e WHERE e.pk_saga = s.pk_saga AND e.state IN ('pending', 'running')
        ORDER BY e.state = 'running' DESC, e.number DESC LIMIT $3::int) AS e
) AS e ON true

-- name: saga_mirror_gone
-- Which of the sagas $2 of shows $1, by name, have ended; an empty show: a run.
SELECT g.at::int AS at
FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS g (show, name, at)
WHERE NOT EXISTS (
  SELECT FROM rota.saga s
  WHERE s.workflow_id = g.name AND s.state IN ('open', 'rolling_back') AND s.pk_show = CASE WHEN g.show = ''
    THEN (SELECT r.pk_show FROM rota.workflow_run r WHERE r.pk_run = CASE WHEN rota.is_uuid(g.name) THEN g.name::uuid END)
    ELSE (SELECT w.pk_show FROM rota.show w WHERE w.str_name = g.show) END)

-- name: saga_mirror_page
-- Up to $2 sagas after id $1 that have not ended.
SELECT pk_saga, pk_show, workflow_id FROM rota.saga WHERE state IN ('open', 'rolling_back') AND pk_saga > $1::bigint
ORDER BY pk_saga LIMIT $2::int

-- name: saga_mirror_rolling
-- Up to $1 sagas that are rolling back.
SELECT pk_show, workflow_id FROM rota.saga WHERE state = 'rolling_back' ORDER BY pk_saga LIMIT $1::int

-- name: timers_count
-- The number of timers, counted up to $1.
SELECT count(*) FROM (SELECT FROM rota.workflow_timer LIMIT $1::int) AS t

-- name: timers_of_runs
-- The timers of runs $1, with their definitions; one index lookup each, whatever the planner's statistics.
SELECT coalesce((SELECT r.pk_workflow FROM rota.workflow_run r WHERE r.pk_run = g.pk_run), 0) AS pk_workflow, t.*
FROM unnest($1::uuid[]) AS g (pk_run)
CROSS JOIN LATERAL (
  SELECT t.pk_run, t.place, t.attempt, floor(extract(epoch FROM t.ts_due) * 1000)::bigint AS due_ms
  FROM rota.workflow_timer t WHERE t.pk_run = g.pk_run OFFSET 0
) AS t

-- name: timers_page
-- Up to $4 timers after that of run $1, place $2, attempt $3, by run, with the definitions of their runs.
SELECT coalesce((SELECT r.pk_workflow FROM rota.workflow_run r WHERE r.pk_run = t.pk_run), 0) AS pk_workflow,
       t.pk_run, t.place, t.attempt, floor(extract(epoch FROM t.ts_due) * 1000)::bigint AS due_ms
FROM rota.workflow_timer t
WHERE (t.pk_run, t.place, t.attempt) > ($1::uuid, $2::smallint, $3::int)
ORDER BY t.pk_run, t.place, t.attempt LIMIT $4::int
