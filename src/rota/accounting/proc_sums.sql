-- What the procs of the shows $1 hold, by everything they are charged to; one pass over the table.
SELECT pk_show, pk_alloc, pk_folder, pk_job, pk_layer, pk_dept,
       sum(int_cores_reserved)::bigint AS cores, sum(int_gpus_reserved)::bigint AS gpus, count(*) AS procs
FROM rota.proc
WHERE pk_show = ANY ($1::uuid[])
GROUP BY pk_show, pk_alloc, pk_folder, pk_job, pk_layer, pk_dept
