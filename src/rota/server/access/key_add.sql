-- Add key $1 with digest $2, name $3 and a life of $4 seconds (none: for good); no row when the id is taken.
INSERT INTO rota.api_key (id, digest, name, ts_expires)
VALUES ($1, $2, $3, now() + make_interval(secs => $4::float8))
ON CONFLICT (id) DO NOTHING RETURNING id
