-- Procs of show $1 with tokens from $2 to $3, by token, at most $4.
SELECT token, pk_alloc, pk_folder, pk_job, pk_layer, pk_dept, pk_host, int_cores_reserved AS cores,
       int_gpus_reserved AS gpus, int_fence AS fence
FROM rota.proc
WHERE token BETWEEN $2::bigint AND $3::bigint AND pk_show = $1::uuid
ORDER BY token LIMIT $4
