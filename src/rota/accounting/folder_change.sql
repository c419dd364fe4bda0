-- Change limits of folder $2 of show $1; null keeps what is there.
UPDATE rota.folder_resource
SET int_min_cores = coalesce($3::bigint, int_min_cores), int_max_cores = coalesce($4::bigint, int_max_cores),
    int_min_gpus = coalesce($5::bigint, int_min_gpus), int_max_gpus = coalesce($6::bigint, int_max_gpus)
WHERE pk_show = $1::uuid AND pk_folder = $2::uuid
