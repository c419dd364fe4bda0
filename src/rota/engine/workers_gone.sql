-- Which of these workers have ended, and which of them nobody knows.
SELECT h AS pk_host, w.state FROM unnest($1::uuid[]) AS h LEFT JOIN rota.worker w ON w.pk_host = h WHERE w.state IS DISTINCT FROM 'up'
