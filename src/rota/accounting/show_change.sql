-- Let show $1 run $2 jobs at once; -1 is as many as there are.
UPDATE rota.show SET int_max_jobs = $2::integer WHERE pk_show = $1::uuid
