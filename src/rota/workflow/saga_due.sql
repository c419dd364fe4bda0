-- Lock up to $1 sagas that roll back and run nothing, each with what is to be undone next, and what its show is called.
SELECT d.pk_saga, d.pk_show, d.workflow_id, d.number, d.pk_job, d.step, d.template, d.attempt, d.took_s,
       coalesce((SELECT w.str_name FROM rota.show w WHERE w.pk_show = d.pk_show), d.pk_show::text) AS show
FROM rota.saga_due($1::int) AS d
