-- Call dept $1 $2.
UPDATE rota.dept SET str_name = $2 WHERE pk_dept = $1::uuid
