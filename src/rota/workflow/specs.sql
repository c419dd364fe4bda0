-- Definitions $1.
SELECT pk_workflow, version, spec FROM rota.workflow WHERE pk_workflow = ANY ($1::bigint[])
