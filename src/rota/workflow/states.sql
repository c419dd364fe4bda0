-- The states of runs $1.
SELECT pk_run, state FROM rota.workflow_run WHERE pk_run = ANY ($1::uuid[])
