-- Limits and counters of job $2 of show $1.
SELECT pk_job AS id, pk_job::text AS name, int_version AS version, int_cores AS cores, int_gpus AS gpus,
       jsonb_build_object('int_max_cores', int_max_cores, 'int_max_gpus', int_max_gpus) AS limits
FROM rota.job_resource WHERE pk_show = $1::uuid AND pk_job = $2::uuid
