-- Members whose lease runs and whose name begins with $1, and the fence of each.
SELECT l.name, l.fence FROM rota.lease l
WHERE starts_with(l.name, $1::text) AND l.holder IS NOT NULL AND l.expires_at > clock_timestamp()
ORDER BY l.name
