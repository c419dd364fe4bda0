-- Write the timers $1 to $4 (runs, places, attempts, milliseconds) that are not there.
INSERT INTO rota.workflow_timer (pk_run, place, attempt, ts_due)
SELECT g.pk_run, g.place, g.attempt, to_timestamp(g.due_ms / 1000.0)
FROM unnest($1::uuid[], $2::smallint[], $3::int[], $4::bigint[]) AS g (pk_run, place, attempt, due_ms)
ON CONFLICT DO NOTHING
