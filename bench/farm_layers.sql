-- Give jobs $2 of show $1, and their layers $3, limits of $4.
WITH jobs AS (INSERT INTO rota.job_resource (pk_job, pk_show, int_max_cores, int_max_gpus)
              SELECT job, $1::uuid, $4::bigint, $4 FROM unnest($2::uuid[]) AS job)
INSERT INTO rota.layer_resource (pk_layer, pk_job, pk_show, int_max_cores, int_max_gpus)
SELECT layer, job, $1, $4, $4 FROM unnest($2::uuid[], $3::uuid[]) AS made (job, layer)
