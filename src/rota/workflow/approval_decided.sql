-- Have run $1 of show $2 hear that its approval $3 has come to state $4, for reason $5, with the output $6.
INSERT INTO rota.workflow_news (kind, workflow_id, pk_show, pk_job, state, reason, request)
VALUES ('approval', $1::text, $2::uuid, $3::uuid, $4::text, $5::text, $6::bytea)
