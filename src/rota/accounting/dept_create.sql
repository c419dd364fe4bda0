-- Make dept $1 named $2.
INSERT INTO rota.dept (pk_dept, str_name) VALUES ($1::uuid, $2)
