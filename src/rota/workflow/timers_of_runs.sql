-- The timers of runs $1, with the definitions of these; looked up one by one, whatever the planner knows of the tables.
SELECT coalesce((SELECT r.pk_workflow FROM rota.workflow_run r WHERE r.pk_run = g.pk_run), 0) AS pk_workflow, t.*
FROM unnest($1::uuid[]) AS g (pk_run)
CROSS JOIN LATERAL (
  SELECT t.pk_run, t.place, t.attempt, floor(extract(epoch FROM t.ts_due) * 1000)::bigint AS due_ms
  FROM rota.workflow_timer t WHERE t.pk_run = g.pk_run OFFSET 0
) AS t
