-- The compensations $1 have ended in state $2, for reason $3; a row for each that was awaited.
UPDATE rota.saga_entry e SET state = g.state, error = g.error, ts_changed = clock_timestamp()
FROM unnest($1::uuid[], $2::text[], $3::text[]) AS g (job, state, error), rota.saga s
WHERE e.pk_undo = g.job AND e.state = 'running' AND s.pk_saga = e.pk_saga
RETURNING e.pk_saga, e.number, e.pk_job, e.pk_undo, e.state, e.error, e.attempt, e.step, s.pk_show, s.workflow_id
