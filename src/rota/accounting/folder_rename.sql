-- Call folder $1 $2.
UPDATE rota.folder SET str_name = $2 WHERE pk_folder = $1::uuid
