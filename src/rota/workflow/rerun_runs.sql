-- Those of the ids $1 that are runs, with where their steps were.
SELECT pk_run, steps FROM rota.workflow_run WHERE pk_run = ANY ($1::uuid[])
