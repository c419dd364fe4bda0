-- The stored hash of one row.
SELECT hash FROM rota.audit WHERE seq = $1
