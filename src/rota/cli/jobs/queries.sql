-- name: jobs_tasks
-- Registrations of the workers that are up.
SELECT hello FROM rota.worker WHERE state = 'up'
