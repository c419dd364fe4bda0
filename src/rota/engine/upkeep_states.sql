-- How many live jobs are in each state, and for how long the oldest of them is.
SELECT state, count(*) AS jobs, extract(epoch FROM clock_timestamp() - min(ts_updated))::float8 AS oldest_s
FROM rota.job GROUP BY state
