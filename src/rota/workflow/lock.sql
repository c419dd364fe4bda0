-- Lock the run $1, if it has not ended.
SELECT pk_run, pk_show, pk_workflow, state, steps, fence, input, pk_root, depth, actor, rota.now_ms() AS now_ms
FROM rota.workflow_run WHERE pk_run = $1::uuid AND ts_ended IS NULL FOR NO KEY UPDATE
