-- Remove pool $1.
DELETE FROM rota.alloc WHERE pk_alloc = $1::uuid
