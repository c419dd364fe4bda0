-- What was submitted as jobs $1, as it is stored, for the hash that people approve; a row for each layer.
SELECT j.pk_job, j.pk_show, j.pk_folder, j.pk_dept, j.str_name AS job_name, j.topic, j.priority, j.workflow_id, j.labels,
       j.request, j.state, j.ends_as, (extract(epoch FROM j.ts_run_at) * 1000000)::bigint AS run_at_us, l.number,
       l.str_name, l.work, l.input, l.input_at, l.first_frame, l.frame_step, l.frames, l.ranges, l.items, c.digest AS place
FROM rota.job j JOIN rota.layer l ON l.pk_job = j.pk_job
LEFT JOIN rota.queue_class q ON q.queue = l.queue LEFT JOIN rota.placement_class c ON c.class_id = q.class_id
WHERE j.pk_job = ANY ($1::uuid[])
ORDER BY j.pk_job, l.number
