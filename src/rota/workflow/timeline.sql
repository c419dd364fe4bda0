-- What happened to run $1 after its advance number $2.
SELECT fence, at, told FROM rota.workflow_event WHERE pk_run = $1::uuid AND fence > $2::bigint ORDER BY fence
