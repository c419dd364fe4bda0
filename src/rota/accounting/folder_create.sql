-- Make folder $2 of show $1 named $3, without limits.
WITH made AS (INSERT INTO rota.folder (pk_folder, pk_show, str_name) VALUES ($2::uuid, $1::uuid, $3))
INSERT INTO rota.folder_resource (pk_folder, pk_show) VALUES ($2::uuid, $1::uuid)
