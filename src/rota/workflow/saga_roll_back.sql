-- Have the sagas $1, $2 begin to roll back because of $3; those that have something to undo.
SELECT rota.saga_roll_back($1::uuid[], $2::text[], $3::text) AS workflow_id
