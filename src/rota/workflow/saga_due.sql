-- Lock up to $1 sagas that roll back and run nothing, each with what is to be undone next.
SELECT pk_saga, pk_show, workflow_id, number, pk_job, step, template, attempt, took_s FROM rota.saga_due($1::int)
