-- Limits that frames of show $1, folder $2, job $3, layer $4 and department $5 meet, with what the tables count there.
-- Level 0 is the show itself; of subscriptions there is one for each pool.
SELECT 0 AS level, pk_show AS id, b_scheduler_managed AS managed, int_fence AS fence, 0::bigint AS cores_max,
       0::bigint AS gpus_max, 0::bigint AS cores, 0::bigint AS gpus
FROM rota.show WHERE pk_show = $1::uuid
UNION ALL
SELECT 1, pk_alloc, false, 0, int_burst, int_gpu_burst, int_cores, int_gpus FROM rota.subscription WHERE pk_show = $1::uuid
UNION ALL
SELECT 2, pk_folder, false, 0, int_max_cores, int_max_gpus, int_cores, int_gpus
FROM rota.folder_resource WHERE pk_folder = $2::uuid
UNION ALL
SELECT 3, pk_job, false, 0, int_max_cores, int_max_gpus, int_cores, int_gpus FROM rota.job_resource WHERE pk_job = $3::uuid
UNION ALL
SELECT 4, pk_layer, false, 0, int_max_cores, int_max_gpus, int_cores, int_gpus
FROM rota.layer_resource WHERE pk_layer = $4::uuid
UNION ALL
SELECT 5, pk_dept, false, 0, int_max_cores, int_max_gpus, int_cores, int_gpus
FROM rota.point WHERE pk_show = $1::uuid AND pk_dept = $5::uuid
ORDER BY level
