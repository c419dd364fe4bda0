-- Folders of show $1, with limits and counters.
SELECT f.pk_folder AS id, f.str_name AS name, r.int_version AS version, r.int_cores AS cores, r.int_gpus AS gpus,
       jsonb_build_object('int_min_cores', r.int_min_cores, 'int_max_cores', r.int_max_cores,
                          'int_min_gpus', r.int_min_gpus, 'int_max_gpus', r.int_max_gpus) AS limits
FROM rota.folder f JOIN rota.folder_resource r USING (pk_folder)
WHERE f.pk_show = $1::uuid ORDER BY f.str_name
