-- Runs whose ids lie between $1 and $2, a few of them.
SELECT pk_run AS id FROM rota.workflow_run WHERE pk_run BETWEEN $1::uuid AND $2::uuid ORDER BY 1 LIMIT 6
