-- The jobs $1, live or done, as the policy sees them, with what was said of each.
SELECT j.pk_job AS id, coalesce(s.str_name, j.pk_show::text) AS show, coalesce(f.str_name, j.pk_folder::text) AS folder,
       coalesce(d.str_name, j.pk_dept::text) AS dept, j.topic, j.priority, j.labels, j.request, j.workflow_id,
       l.works, l.requires, l.frames, l.input_bytes, w.told
FROM (
  SELECT pk_job, pk_show, pk_folder, pk_dept, topic, priority, labels, request, workflow_id, word, NULL::rota.layer[] AS layers
  FROM rota.job WHERE pk_job = ANY ($1::uuid[])
  UNION ALL
  SELECT pk_job, pk_show, pk_folder, pk_dept, topic, priority, labels, request, workflow_id, word, layers
  FROM rota.job_done WHERE pk_job = ANY ($1::uuid[])
) AS j
LEFT JOIN rota.show s USING (pk_show) LEFT JOIN rota.folder f USING (pk_folder) LEFT JOIN rota.dept d USING (pk_dept)
LEFT JOIN rota.policy_word w USING (word)
CROSS JOIN LATERAL (
  SELECT array_agg(l.work ORDER BY l.number) AS works, array_agg(l.frames ORDER BY l.number) AS frames,
         jsonb_agg(coalesce(c.requires, '{}') ORDER BY l.number) AS requires,
         array_agg(coalesce(length(l.input), split_part(l.input_at, ':', 3)::bigint, 0)
                   + (SELECT coalesce(sum(length(i)), 0) FROM unnest(l.items) AS i) ORDER BY l.number)::bigint[] AS input_bytes
  FROM (
    SELECT * FROM rota.layer WHERE pk_job = j.pk_job AND j.layers IS NULL
    UNION ALL
    SELECT * FROM unnest(j.layers)
  ) AS l
  LEFT JOIN rota.queue_class q ON q.queue = l.queue
  LEFT JOIN rota.placement_class c ON c.class_id = q.class_id
) AS l
WHERE l.works IS NOT NULL
ORDER BY j.pk_job DESC
