-- The runs $1 with their definitions, as the approvals of their steps are about them.
SELECT r.pk_run, r.pk_show, r.pk_workflow, r.steps, r.input, r.actor, w.digest
FROM rota.workflow_run r JOIN rota.workflow w USING (pk_workflow) WHERE r.pk_run = ANY ($1::uuid[])
