-- The run $1 with its definition.
SELECT r.pk_run, r.pk_show, s.str_name AS show, w.name, w.version, w.spec, r.state, r.error, r.steps, r.input, r.output,
       r.pk_parent, r.ts_started, r.ts_ended
FROM rota.workflow_run r JOIN rota.workflow w USING (pk_workflow) JOIN rota.show s ON s.pk_show = r.pk_show
WHERE r.pk_run = $1::uuid
