-- Tell whoever books for show $1 that Redis has its limits as they are now.
SELECT pg_notify('rota_limits', $1::text)
