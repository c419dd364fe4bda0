-- name: worker_add
-- Store a worker of pool $3 with the id $1, which sends a heartbeat every $5 seconds; no row when there is no such pool.
INSERT INTO rota.worker (pk_host, str_name, pool, pk_alloc, hello, heartbeat_s)
SELECT $1::uuid, $2::text, a.str_name, a.pk_alloc, $4::bytea, $5::float8 FROM rota.alloc a WHERE a.str_name = $3::text
RETURNING pk_host
