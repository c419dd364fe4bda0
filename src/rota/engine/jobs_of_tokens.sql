-- The jobs that these tokens are booked for.
SELECT DISTINCT pk_job FROM rota.proc WHERE token = ANY ($1::bigint[])
