-- Call show $1 $2.
UPDATE rota.show SET str_name = $2 WHERE pk_show = $1::uuid
