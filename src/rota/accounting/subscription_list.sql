-- Subscriptions of show $1 by pool, with limits and counters.
SELECT b.pk_alloc AS id, a.str_name AS name, b.int_version AS version, b.int_cores AS cores, b.int_gpus AS gpus,
       jsonb_build_object('int_size', b.int_size, 'int_burst', b.int_burst, 'int_gpu_burst', b.int_gpu_burst) AS limits
FROM rota.subscription b JOIN rota.alloc a USING (pk_alloc)
WHERE b.pk_show = $1::uuid ORDER BY a.str_name
