-- Limits that frames of layer $1 meet, with what procs use of each: a subscription for each pool, then the other four.
WITH one AS (
  SELECT l.pk_layer, j.pk_job, j.pk_show, j.pk_folder, j.pk_dept
  FROM rota.layer l JOIN rota.job j USING (pk_job) WHERE l.pk_layer = $1::uuid
), used AS (
  SELECT p.pk_alloc, p.pk_folder, p.pk_job, p.pk_layer, p.pk_dept, sum(p.int_cores_reserved) AS cores,
         sum(p.int_gpus_reserved) AS gpus
  FROM rota.proc p JOIN one USING (pk_show) GROUP BY 1, 2, 3, 4, 5
), met AS (
  SELECT 'subscription' AS level, a.str_name AS name, s.int_burst AS cores_max, s.int_gpu_burst AS gpus_max, u.cores, u.gpus
  FROM rota.subscription s JOIN one USING (pk_show) JOIN rota.alloc a USING (pk_alloc) LEFT JOIN used u USING (pk_alloc)
  UNION ALL
  SELECT 'folder', f.str_name, r.int_max_cores, r.int_max_gpus, u.cores, u.gpus
  FROM one JOIN rota.folder f USING (pk_folder) JOIN rota.folder_resource r USING (pk_folder)
  LEFT JOIN used u ON u.pk_folder = one.pk_folder
  UNION ALL
  SELECT 'job', one.pk_job::text, r.int_max_cores, r.int_max_gpus, u.cores, u.gpus
  FROM one JOIN rota.job_resource r USING (pk_job) LEFT JOIN used u ON u.pk_job = one.pk_job
  UNION ALL
  SELECT 'layer', one.pk_layer::text, r.int_max_cores, r.int_max_gpus, u.cores, u.gpus
  FROM one JOIN rota.layer_resource r USING (pk_layer) LEFT JOIN used u ON u.pk_layer = one.pk_layer
  UNION ALL
  SELECT 'point', d.str_name, r.int_max_cores, r.int_max_gpus, u.cores, u.gpus
  FROM one JOIN rota.point r ON r.pk_show = one.pk_show AND r.pk_dept = one.pk_dept
  JOIN rota.dept d ON d.pk_dept = one.pk_dept LEFT JOIN used u ON u.pk_dept = one.pk_dept
)
SELECT level, name, cores_max, gpus_max, coalesce(sum(cores), 0)::bigint AS cores, coalesce(sum(gpus), 0)::bigint AS gpus
FROM met GROUP BY level, name, cores_max, gpus_max ORDER BY name
