-- What is booked for job $1.
SELECT token, pk_layer FROM rota.proc WHERE pk_job = $1::uuid ORDER BY token LIMIT $2::integer
