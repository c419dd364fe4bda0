-- Who uses most of what key $3 of level $2 limits in show $1, at most $4: jobs, or the layers of a job that has a cap.
SELECT u.id, coalesce(l.str_name, j.str_name, u.id::text) AS name, u.frames, u.cores, u.gpus
FROM (
  SELECT CASE WHEN $2::text = 'job' THEN p.pk_layer ELSE p.pk_job END AS id, count(*) AS frames,
         sum(p.int_cores_reserved)::bigint AS cores, sum(p.int_gpus_reserved)::bigint AS gpus
  FROM rota.proc p
  WHERE p.pk_show = $1::uuid AND $3::uuid = CASE $2 WHEN 'subscription' THEN p.pk_alloc WHEN 'folder' THEN p.pk_folder
                                                    WHEN 'job' THEN p.pk_job WHEN 'layer' THEN p.pk_layer
                                                    ELSE p.pk_dept END
  GROUP BY 1 ORDER BY 3 DESC, 4 DESC, 1 LIMIT $4::integer
) AS u
LEFT JOIN rota.layer l ON $2 = 'job' AND l.pk_layer = u.id
LEFT JOIN rota.job j ON j.pk_job = u.id
ORDER BY u.cores DESC, u.gpus DESC, u.id
