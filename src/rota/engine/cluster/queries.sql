-- name: worker_add
-- Store a worker of pool $3 with the id $1; no row when there is no such pool.
INSERT INTO rota.worker (pk_host, str_name, pool, pk_alloc, hello)
SELECT $1::uuid, $2::text, a.str_name, a.pk_alloc, $4::bytea FROM rota.alloc a WHERE a.str_name = $3::text
RETURNING pk_host
