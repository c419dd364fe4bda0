-- The next $3 procs of show $1 from token $2 on, by charge; a row per charge with its tokens.
WITH page AS (
  SELECT * FROM rota.proc WHERE token >= $2::bigint AND pk_show = $1::uuid ORDER BY token LIMIT $3
)
SELECT pk_alloc, pk_folder, pk_job, pk_layer, pk_dept, int_cores_reserved AS cores, int_gpus_reserved AS gpus,
       array_agg(token ORDER BY token) AS tokens
FROM page
GROUP BY pk_alloc, pk_folder, pk_job, pk_layer, pk_dept, int_cores_reserved, int_gpus_reserved
