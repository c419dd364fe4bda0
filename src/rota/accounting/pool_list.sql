-- Every pool.
SELECT pk_alloc AS id, str_name AS name, int_version AS version FROM rota.alloc ORDER BY str_name
