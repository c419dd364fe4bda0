-- name: jobs_tasks
-- What the workers said of themselves that are up.
SELECT hello FROM rota.worker WHERE state = 'up'
