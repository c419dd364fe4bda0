-- Forget up to $2 sagas that ended more than $1 seconds ago; how many.
WITH gone AS (
  DELETE FROM rota.saga s USING (
    SELECT o.pk_saga FROM rota.saga o
    WHERE o.ts_ended < clock_timestamp() - make_interval(secs => $1::float8) AND o.state IN ('rolled_back', 'incomplete')
    ORDER BY o.ts_ended LIMIT $2::int FOR UPDATE SKIP LOCKED
  ) AS old WHERE s.pk_saga = old.pk_saga RETURNING 1
)
SELECT count(*) FROM gone
