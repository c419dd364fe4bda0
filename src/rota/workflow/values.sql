-- What steps of the runs $1 returned.
SELECT pk_run, place, value FROM rota.workflow_value WHERE pk_run = ANY ($1::uuid[])
