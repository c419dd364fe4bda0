-- How many messages wait ($1 and more count as $1), how old the first one is, and how many are parked.
SELECT
  (SELECT count(*) FROM (SELECT FROM rota.outbox LIMIT $1::int) AS waiting) AS depth,
  (SELECT extract(epoch FROM clock_timestamp() - created_at)::float8 FROM rota.outbox ORDER BY id LIMIT 1)
    AS oldest_age_s,
  (SELECT count(*) FROM (SELECT FROM rota.outbox_parked LIMIT $1::int) AS aside) AS parked
