-- Limits and counters of layer $2 of show $1.
SELECT pk_layer AS id, pk_layer::text AS name, int_version AS version, int_cores AS cores, int_gpus AS gpus,
       jsonb_build_object('int_max_cores', int_max_cores, 'int_max_gpus', int_max_gpus) AS limits
FROM rota.layer_resource WHERE pk_show = $1::uuid AND pk_layer = $2::uuid
