-- What undoes the jobs $1, and what has become of that; its sagas are locked.
SELECT e.pk_job, e.state, s.state AS saga, s.workflow_id FROM rota.saga_entry e JOIN rota.saga s USING (pk_saga)
WHERE e.pk_job = ANY ($1::uuid[]) ORDER BY s.pk_saga FOR NO KEY UPDATE OF s
