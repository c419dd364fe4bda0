-- How the runs $1 ended, those of them that are there.
SELECT pk_run, state, error, steps FROM rota.workflow_run WHERE pk_run = ANY ($1::uuid[])
