-- The saga $2 of show $1 with its entries, the last recorded first.
SELECT s.state AS saga, s.reason, e.number, e.pk_job, e.step, e.state, e.attempt, e.pk_undo, e.error
FROM rota.saga s LEFT JOIN rota.saga_entry e USING (pk_saga)
WHERE s.pk_show = $1::uuid AND s.workflow_id = $2::text ORDER BY e.number DESC
