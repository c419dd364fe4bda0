-- Ends of up to $1 jobs that are for sagas to hear: compensations, and jobs of no run that goes on.
SELECT kind, workflow_id, pk_show, pk_job, state, request, code, error, of_run FROM rota.saga_take($1::int)
