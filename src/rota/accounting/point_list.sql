-- Points of show $1 by department, with limits and counters.
SELECT p.pk_dept AS id, d.str_name AS name, p.int_version AS version, p.int_cores AS cores, p.int_gpus AS gpus,
       jsonb_build_object('int_min_cores', p.int_min_cores, 'int_max_cores', p.int_max_cores,
                          'int_min_gpus', p.int_min_gpus, 'int_max_gpus', p.int_max_gpus) AS limits
FROM rota.point p JOIN rota.dept d USING (pk_dept)
WHERE p.pk_show = $1::uuid ORDER BY d.str_name
