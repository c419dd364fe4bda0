-- Jobs by id, live or done; one that ends meanwhile is found once.
SELECT j.pk_job AS id, coalesce(s.str_name, j.pk_show::text) AS show, coalesce(f.str_name, j.pk_folder::text) AS folder,
       coalesce(d.str_name, j.pk_dept::text) AS dept, j.str_name AS name, j.topic, j.priority, j.state, j.reason,
       j.labels, j.request, j.workflow_id, j.ts_submitted AS submitted_at, j.ts_deadline AS deadline_at,
       j.ts_wait_until AS wait_until, j.ts_run_at AS run_at, j.ts_finished AS finished_at, j.history, j.layers, w.told AS policy
FROM (
  SELECT pk_job, pk_show, pk_folder, pk_dept, str_name, topic, priority, state, reason, labels, request, workflow_id,
         ts_submitted, ts_deadline, ts_wait_until, ts_run_at, NULL::timestamptz AS ts_finished, history, word,
         (SELECT jsonb_agg(rota.layer_shown(l) ORDER BY l.number) FROM rota.layer l WHERE l.pk_job = job.pk_job)
           AS layers
  FROM rota.job WHERE pk_job = ANY ($1::uuid[])
  UNION ALL
  SELECT pk_job, pk_show, pk_folder, pk_dept, str_name, topic, priority, state, reason, labels, request, workflow_id,
         ts_submitted, ts_deadline, NULL, NULL, ts_finished, history, word,
         (SELECT jsonb_agg(rota.layer_shown(l) ORDER BY l.number) FROM unnest(layers) AS l)
  FROM rota.job_done WHERE pk_job = ANY ($1::uuid[])
) AS j
LEFT JOIN rota.show s USING (pk_show) LEFT JOIN rota.folder f USING (pk_folder) LEFT JOIN rota.dept d USING (pk_dept)
LEFT JOIN rota.policy_word w USING (word)
