-- The runs of show $1 that have the keys $2.
SELECT key, pk_run, pk_workflow, input FROM rota.workflow_run WHERE pk_show = $1::uuid AND key = ANY ($2::text[])
