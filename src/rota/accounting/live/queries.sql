-- name: limits_of_show
-- Limits and fence of show $1 from one snapshot: all of them, or those of the ids $2; level 0 is the show itself.
SELECT 0 AS level, pk_show AS id, int_version AS version, int_fence AS fence, int_founded AS founded,
       b_scheduler_managed AS managed, '{}'::text[] AS fields, '{}'::bigint[] AS amounts
FROM rota.show WHERE pk_show = $1::uuid
UNION ALL
SELECT 1, pk_alloc, int_version, 0, 0, true, '{size,burst,gpu_burst}', ARRAY[int_size, int_burst, int_gpu_burst]
FROM rota.subscription WHERE pk_show = $1::uuid AND ($2::uuid[] IS NULL OR pk_alloc = ANY ($2::uuid[]))
UNION ALL
SELECT 2, pk_folder, int_version, 0, 0, true, '{int_min_cores,int_max_cores,int_min_gpus,int_max_gpus}',
       ARRAY[int_min_cores, int_max_cores, int_min_gpus, int_max_gpus]
FROM rota.folder_resource WHERE pk_show = $1::uuid AND ($2::uuid[] IS NULL OR pk_folder = ANY ($2::uuid[]))
UNION ALL
SELECT 3, pk_job, int_version, 0, 0, true, '{int_max_cores,int_max_gpus,int_priority}',
       ARRAY[int_max_cores, int_max_gpus, int_priority]
FROM rota.job_resource WHERE pk_show = $1::uuid AND ($2::uuid[] IS NULL OR pk_job = ANY ($2::uuid[]))
UNION ALL
SELECT 4, pk_layer, int_version, 0, 0, true, '{int_max_cores,int_max_gpus}', ARRAY[int_max_cores, int_max_gpus]
FROM rota.layer_resource WHERE pk_show = $1::uuid AND ($2::uuid[] IS NULL OR pk_layer = ANY ($2::uuid[]))
UNION ALL
SELECT 5, pk_dept, int_version, 0, 0, true, '{int_min_cores,int_max_cores,int_min_gpus,int_max_gpus}',
       ARRAY[int_min_cores, int_max_cores, int_min_gpus, int_max_gpus]
FROM rota.point WHERE pk_show = $1::uuid AND ($2::uuid[] IS NULL OR pk_dept = ANY ($2::uuid[]))

-- name: point_ensure
-- Create missing points of show $1 for the departments $2.
INSERT INTO rota.point (pk_show, pk_dept)
SELECT s.pk_show, d.pk_dept FROM rota.show s CROSS JOIN rota.dept d
WHERE s.pk_show = $1::uuid AND d.pk_dept = ANY ($2::uuid[])
  AND NOT EXISTS (SELECT FROM rota.point p WHERE p.pk_show = s.pk_show AND p.pk_dept = d.pk_dept)
ORDER BY d.pk_dept ON CONFLICT DO NOTHING

-- name: show_found
-- Raise the fence of show $1 for a Redis that must be seeded; returns the new fence.
SELECT rota.show_found($1::uuid)
