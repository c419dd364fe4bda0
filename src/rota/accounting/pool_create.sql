-- Make pool $1 named $2.
INSERT INTO rota.alloc (pk_alloc, str_name) VALUES ($1::uuid, $2)
