-- The value whose hash is $1.
SELECT data FROM rota.blob WHERE sha256 = $1::bytea LIMIT 1
