-- Configure pool $1: provides $2, status $3, description $4, draining since $5 ms, for $6 s at most.
INSERT INTO rota.pool_spec (pk_alloc, provides, status, description, ts_drain_started, drain_timeout_s)
VALUES ($1::uuid, $2::text[], $3, $4, to_timestamp($5::bigint / 1000.0), $6)
ON CONFLICT (pk_alloc) DO UPDATE SET (provides, status, description, ts_drain_started, drain_timeout_s)
  = (excluded.provides, excluded.status, excluded.description, excluded.ts_drain_started, excluded.drain_timeout_s)
