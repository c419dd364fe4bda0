-- Those of the jobs $2 of show $1, in their order, that may run.
SELECT rota.jobs_let_in($1::uuid, $2::uuid[])
