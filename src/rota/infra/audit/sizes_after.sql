-- How many bytes each of the next $2 rows after number $1 holds.
SELECT seq, octet_length(actor) + octet_length(action) + octet_length(target) + octet_length(detail::text) AS bytes
FROM rota.audit WHERE seq > $1 ORDER BY seq LIMIT $2
