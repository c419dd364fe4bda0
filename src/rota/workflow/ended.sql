-- Lock the run $1, if it has ended, so that two who run it again come one after the other.
SELECT pk_run, pk_show, pk_workflow, steps, input FROM rota.workflow_run WHERE pk_run = $1::uuid AND ts_ended IS NOT NULL
FOR NO KEY UPDATE
