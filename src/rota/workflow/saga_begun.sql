-- The entries $1, $2 are run by jobs $3.
UPDATE rota.saga_entry e SET state = 'running', pk_undo = g.job, ts_changed = clock_timestamp()
FROM unnest($1::bigint[], $2::bigint[], $3::uuid[]) AS g (pk_saga, number, job)
WHERE e.pk_saga = g.pk_saga AND e.number = g.number AND e.state = 'pending'
