-- Remove folder $2 of show $1.
DELETE FROM rota.folder WHERE pk_show = $1::uuid AND pk_folder = $2::uuid
