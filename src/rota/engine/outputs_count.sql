-- Move $3 frames of each of the layers $1, of jobs $2, from succeeded to quarantined; the jobs whose end is another now.
SELECT pk_job, pk_show, topic, state, workflow_id FROM rota.outputs_count($1::uuid[], $2::uuid[], $3::integer[], $4::text)
