-- End those of the jobs $1 that have no frame left; $2 is why, if there is a reason of its own.
SELECT pk_job, pk_show, topic, state, workflow_id FROM rota.jobs_finish($1::uuid[], $2::text)
