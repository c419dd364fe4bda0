-- The timers of run $1.
SELECT place, attempt, ts_due FROM rota.workflow_timer WHERE pk_run = $1::uuid ORDER BY ts_due
