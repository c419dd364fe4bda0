-- What the runs $1 returned.
SELECT pk_run, output FROM rota.workflow_run WHERE pk_run = ANY ($1::uuid[])
