-- Procs on workers that have ended, the oldest first.
SELECT p.token, p.pk_host FROM rota.proc p JOIN rota.worker w ON w.pk_host = p.pk_host
WHERE w.state <> 'up' ORDER BY p.token LIMIT $1::integer
