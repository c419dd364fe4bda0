-- Have saga $2 of show $1 roll back, or go on with what was not undone, because of $3; how much that is.
SELECT rota.saga_resume($1::uuid, $2::text, $3::text) AS entries
