-- Forget failed frames that failed more than $1 seconds ago, at most $2; they stay counted, in the rollup.
SELECT token FROM rota.queue_discard(ARRAY(
  SELECT d.token FROM rota.done_entries d
  WHERE d.failed_at < clock_timestamp() - make_interval(secs => $1::float8)
  ORDER BY d.failed_at LIMIT $2::int), true) AS token
