-- Forget up to $2 runs that ended more than $1 seconds ago, as did the run that they belong to, with all of theirs; how many.
WITH old AS MATERIALIZED (
  SELECT r.pk_run FROM rota.workflow_run r
  WHERE r.ts_ended < clock_timestamp() - make_interval(secs => $1::float8)
    AND NOT EXISTS (
      SELECT FROM rota.workflow_run o WHERE o.pk_run = r.pk_root
      AND (o.ts_ended IS NULL OR o.ts_ended >= clock_timestamp() - make_interval(secs => $1::float8)))
    AND NOT EXISTS (SELECT FROM rota.saga s WHERE s.pk_show = r.pk_show AND s.workflow_id = r.pk_root::text)
  ORDER BY r.ts_ended LIMIT $2::int FOR UPDATE SKIP LOCKED
), events AS (DELETE FROM rota.workflow_event e USING old WHERE e.pk_run = old.pk_run
), outputs AS (DELETE FROM rota.workflow_value v USING old WHERE v.pk_run = old.pk_run
), timers AS (DELETE FROM rota.workflow_timer t USING old WHERE t.pk_run = old.pk_run
), gone AS (DELETE FROM rota.workflow_run r USING old WHERE r.pk_run = old.pk_run RETURNING 1)
SELECT count(*) FROM gone
