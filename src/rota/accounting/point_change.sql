-- Change limits of department $2 in show $1; null keeps what is there.
UPDATE rota.point
SET int_min_cores = coalesce($3::bigint, int_min_cores), int_max_cores = coalesce($4::bigint, int_max_cores),
    int_min_gpus = coalesce($5::bigint, int_min_gpus), int_max_gpus = coalesce($6::bigint, int_max_gpus)
WHERE pk_show = $1::uuid AND pk_dept = $2::uuid
