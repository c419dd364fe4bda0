-- What undoes the jobs $1 and earlier rounds of their steps, what has become of that, and whether its run goes on; its sagas are locked.
SELECT e.pk_job, n.pk_job AS last, e.state, s.state AS saga, s.workflow_id, EXISTS (
         SELECT FROM rota.workflow_run r
         WHERE r.pk_run = CASE WHEN rota.is_uuid(s.workflow_id) THEN s.workflow_id::uuid END
           AND r.pk_show = s.pk_show AND r.ts_ended IS NULL) AS goes_on
FROM (SELECT DISTINCT ON (pk_saga, step) pk_saga, step, pk_job FROM rota.saga_entry WHERE pk_job = ANY ($1::uuid[])) AS n
JOIN rota.saga_entry e USING (pk_saga, step) JOIN rota.saga s USING (pk_saga)
ORDER BY s.pk_saga FOR NO KEY UPDATE OF s
