-- Approval $1 from pending to $2.
UPDATE rota.approval SET state = $2::text, ts_decided = clock_timestamp()
WHERE pk_approval = $1::uuid AND (state = 'pending' OR $2 = 'stale')
