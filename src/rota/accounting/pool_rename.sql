-- Call pool $1 $2.
UPDATE rota.alloc SET str_name = $2 WHERE pk_alloc = $1::uuid
