-- Every counter of show $1 in the five tables that is not 0; levels are numbered in the order of the checks.
SELECT 1 AS level, pk_alloc AS id, int_cores AS cores, int_gpus AS gpus
FROM rota.subscription WHERE pk_show = $1::uuid AND (int_cores, int_gpus) <> (0, 0)
UNION ALL
SELECT 2, pk_folder, int_cores, int_gpus
FROM rota.folder_resource WHERE pk_show = $1::uuid AND (int_cores, int_gpus) <> (0, 0)
UNION ALL
SELECT 3, pk_job, int_cores, int_gpus
FROM rota.job_resource WHERE pk_show = $1::uuid AND (int_cores, int_gpus) <> (0, 0)
UNION ALL
SELECT 4, pk_layer, int_cores, int_gpus
FROM rota.layer_resource WHERE pk_show = $1::uuid AND (int_cores, int_gpus) <> (0, 0)
UNION ALL
SELECT 5, pk_dept, int_cores, int_gpus
FROM rota.point WHERE pk_show = $1::uuid AND (int_cores, int_gpus) <> (0, 0)
