-- Change limits of job $2 of show $1; null keeps what is there.
UPDATE rota.job_resource
SET int_max_cores = coalesce($3::bigint, int_max_cores), int_max_gpus = coalesce($4::bigint, int_max_gpus)
WHERE pk_show = $1::uuid AND pk_job = $2::uuid
