-- Up to $4 timers after that of run $1, place $2, attempt $3, by run, with the definitions of their runs.
SELECT coalesce((SELECT r.pk_workflow FROM rota.workflow_run r WHERE r.pk_run = t.pk_run), 0) AS pk_workflow,
       t.pk_run, t.place, t.attempt, floor(extract(epoch FROM t.ts_due) * 1000)::bigint AS due_ms
FROM rota.workflow_timer t
WHERE (t.pk_run, t.place, t.attempt) > ($1::uuid, $2::smallint, $3::int)
ORDER BY t.pk_run, t.place, t.attempt LIMIT $4::int
