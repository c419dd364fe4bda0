-- How many timers there are, counted up to $1.
SELECT count(*) FROM (SELECT FROM rota.workflow_timer LIMIT $1::int) AS t
