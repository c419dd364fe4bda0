-- Which of these tokens have a proc on worker $1 (null: on any), and of what.
SELECT token, pk_show, pk_job, pk_layer, pk_host
FROM rota.proc WHERE token = ANY ($2::bigint[]) AND ($1::uuid IS NULL OR pk_host = $1)
