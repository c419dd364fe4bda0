-- What rows say that show $1 uses, by pool: in all, in folder $2, for job $3 and layer $4, and by department $5.
SELECT pk_alloc AS alloc, sum(int_cores_reserved)::bigint AS cores, sum(int_gpus_reserved)::bigint AS gpus,
       coalesce(sum(int_cores_reserved) FILTER (WHERE pk_folder = $2::uuid), 0)::bigint AS folder_cores,
       coalesce(sum(int_gpus_reserved) FILTER (WHERE pk_folder = $2), 0)::bigint AS folder_gpus,
       coalesce(sum(int_cores_reserved) FILTER (WHERE pk_job = $3::uuid), 0)::bigint AS job_cores,
       coalesce(sum(int_gpus_reserved) FILTER (WHERE pk_job = $3), 0)::bigint AS job_gpus,
       coalesce(sum(int_cores_reserved) FILTER (WHERE pk_layer = $4::uuid), 0)::bigint AS layer_cores,
       coalesce(sum(int_gpus_reserved) FILTER (WHERE pk_layer = $4), 0)::bigint AS layer_gpus,
       coalesce(sum(int_cores_reserved) FILTER (WHERE pk_dept = $5::uuid), 0)::bigint AS point_cores,
       coalesce(sum(int_gpus_reserved) FILTER (WHERE pk_dept = $5), 0)::bigint AS point_gpus
FROM rota.proc WHERE pk_show = $1::uuid GROUP BY pk_alloc
