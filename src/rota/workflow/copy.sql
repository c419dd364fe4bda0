-- Have run $1 begin with state $4, and with what the steps $3 of run $2 returned.
WITH state AS (UPDATE rota.workflow_run SET steps = $4::bytea WHERE pk_run = $1::uuid)
INSERT INTO rota.workflow_value (pk_run, place, value)
SELECT $1::uuid, v.place, v.value FROM rota.workflow_value v WHERE v.pk_run = $2::uuid AND v.place = ANY ($3::smallint[])
