-- Write the news of jobs $3, which steps of runs $1 in shows $2 wait for, again; a job that is gone has failed.
INSERT INTO rota.workflow_news (kind, workflow_id, pk_show, pk_job, state, reason, pk_layer, frames, request, ts_at)
SELECT 'job', g.pk_run::text, g.pk_show, g.pk_job, coalesce(d.state, 'FAILED'),
       CASE WHEN d.pk_job IS NULL THEN 'Its job is gone, and nothing is known of its end.' ELSE d.reason END,
       d.layers[1].pk_layer, coalesce(d.layers[1].frames, 1), d.request, coalesce(d.ts_finished, clock_timestamp())
FROM unnest($1::uuid[], $2::uuid[], $3::uuid[]) AS g (pk_run, pk_show, pk_job)
LEFT JOIN LATERAL (SELECT * FROM rota.job_done d WHERE d.pk_job = g.pk_job LIMIT 1) AS d ON true
