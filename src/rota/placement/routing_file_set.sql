-- Remember that the content with digest $1 was loaded.
INSERT INTO rota.routing_file (digest) VALUES ($1)
ON CONFLICT (b_one) DO UPDATE SET digest = excluded.digest, ts_loaded = now()
