-- What is booked where, behind token $1, a page of $2: for how long, and whether its job has ended meanwhile.
SELECT p.token, p.pk_host, extract(epoch FROM clock_timestamp() - p.ts_booked)::float8 AS age_s, l.pk_layer IS NULL AS ended, l.work
FROM rota.proc p LEFT JOIN rota.layer l ON l.pk_layer = p.pk_layer
WHERE p.token > $1::bigint ORDER BY p.token LIMIT $2::integer
