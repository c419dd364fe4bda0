-- name: local_worker_up
-- Whether a worker with the name $1 is up.
SELECT EXISTS (SELECT FROM rota.worker WHERE str_name = $1::text AND state = 'up')
