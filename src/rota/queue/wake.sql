-- Tell dispatchers that there may be something to claim.
SELECT pg_notify('rota_queue', $1::text)
