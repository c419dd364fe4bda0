-- Claim at most $1 outputs that are due to be looked into, for $2 seconds, with what there is to look at.
WITH due AS (
  SELECT s.token FROM rota.scan s WHERE s.ts_due <= now() ORDER BY s.ts_due LIMIT $1::integer FOR UPDATE SKIP LOCKED
), claimed AS (
  UPDATE rota.scan s SET ts_due = clock_timestamp() + make_interval(secs => $2::float8), tries = s.tries + 1,
    unsettled = s.unsettled + 1
  FROM due WHERE s.token = due.token RETURNING s.*
)
SELECT c.token, c.pk_layer, c.frame, c.pk_job, c.pk_show, c.mode, c.budget_s, c.meta, c.tries, c.unsettled, c.ts_ended,
       extract(epoch FROM clock_timestamp() - c.ts_ended)::float8 AS age_s, e.state, e.value, e.value_at, e.artifacts
FROM claimed c
LEFT JOIN rota.frame_end e
  ON e.pk_layer = c.pk_layer AND e.frame = c.frame AND e.token = c.token AND e.ts_finished >= c.ts_ended
ORDER BY c.token
