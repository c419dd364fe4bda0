-- The run $1, if it has ended.
SELECT pk_run, pk_show, pk_workflow, steps, input FROM rota.workflow_run WHERE pk_run = $1::uuid AND ts_ended IS NOT NULL
