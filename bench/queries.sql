-- name: empty
-- Remove all procs and graves, and what is left of them.
TRUNCATE rota.proc, rota.proc_grave

-- name: farm
-- Make show $1 (name $2, managed $3) with pool $4, folder $5 and department $6, limits of $7 everywhere.
WITH shows AS (INSERT INTO rota.show (pk_show, str_name, b_scheduler_managed) VALUES ($1::uuid, $2::text, $3::boolean)),
     pools AS (INSERT INTO rota.alloc (pk_alloc, str_name) VALUES ($4::uuid, $2)),
     depts AS (INSERT INTO rota.dept (pk_dept, str_name) VALUES ($6::uuid, $2)),
     folders AS (INSERT INTO rota.folder (pk_folder, pk_show, str_name) VALUES ($5::uuid, $1, $2)),
     shares AS (INSERT INTO rota.subscription (pk_subscription, pk_show, pk_alloc, int_size, int_burst, int_gpu_burst)
                VALUES (gen_random_uuid(), $1, $4, 0, $7::bigint, $7)),
     caps AS (INSERT INTO rota.folder_resource (pk_folder, pk_show, int_max_cores, int_max_gpus)
              VALUES ($5, $1, $7, $7))
INSERT INTO rota.point (pk_show, pk_dept, int_max_cores, int_max_gpus) VALUES ($1, $6, $7, $7)

-- name: farm_layers
-- Give jobs $2 of show $1, and their layers $3, limits of $4.
WITH jobs AS (INSERT INTO rota.job_resource (pk_job, pk_show, int_max_cores, int_max_gpus)
              SELECT job, $1::uuid, $4::bigint, $4 FROM unnest($2::uuid[]) AS job)
INSERT INTO rota.layer_resource (pk_layer, pk_job, pk_show, int_max_cores, int_max_gpus)
SELECT layer, job, $1, $4, $4 FROM unnest($2::uuid[], $3::uuid[]) AS made (job, layer)

-- name: one
-- The smallest useful query: one parameter, one row.
SELECT $1::int + 1

