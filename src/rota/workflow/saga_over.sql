-- The entries $1, $2 of sagas have ended in state $3, for reason $4.
UPDATE rota.saga_entry e SET state = g.state, error = g.error, ts_changed = clock_timestamp()
FROM unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[]) AS g (pk_saga, number, state, error)
WHERE e.pk_saga = g.pk_saga AND e.number = g.number AND e.state = 'pending'
