-- Those of the jobs $1 that wait for a decision, with all that the policy is asked about, and what time it is.
SELECT j.pk_job AS id, coalesce(s.str_name, j.pk_show::text) AS show, coalesce(f.str_name, j.pk_folder::text) AS folder,
       coalesce(d.str_name, j.pk_dept::text) AS dept, j.topic, j.priority, j.reason, j.labels, j.request, j.workflow_id,
       l.works, l.requires, l.frames, l.input_bytes, clock_timestamp() AS now
FROM rota.job j
LEFT JOIN rota.show s USING (pk_show) LEFT JOIN rota.folder f USING (pk_folder) LEFT JOIN rota.dept d USING (pk_dept)
CROSS JOIN LATERAL (
  SELECT array_agg(l.work ORDER BY l.number) AS works, array_agg(l.frames ORDER BY l.number) AS frames,
         jsonb_agg(coalesce(c.requires, '{}') ORDER BY l.number) AS requires,
         array_agg(coalesce(length(l.input), split_part(l.input_at, ':', 3)::bigint, 0)
                   + (SELECT coalesce(sum(length(i)), 0) FROM unnest(l.items) AS i) ORDER BY l.number)::bigint[] AS input_bytes
  FROM rota.layer l
  LEFT JOIN rota.queue_class q ON q.queue = l.queue
  LEFT JOIN rota.placement_class c ON c.class_id = q.class_id
  WHERE l.pk_job = j.pk_job
) AS l
WHERE j.pk_job = ANY ($1::uuid[]) AND j.state = 'PENDING' AND j.ends_as IS NULL
  AND j.reason IS DISTINCT FROM 'waiting_on_job' AND l.works IS NOT NULL
ORDER BY j.pk_job
