-- Forget up to $2 versions of definitions from more than $1 seconds ago that are neither the latest nor those of a run; how many.
WITH gone AS (
  DELETE FROM rota.workflow w USING (
    SELECT o.pk_workflow FROM rota.workflow o
    WHERE o.ts_created < clock_timestamp() - make_interval(secs => $1::float8)
      AND EXISTS (SELECT FROM rota.workflow n WHERE n.pk_show = o.pk_show AND n.name = o.name AND n.version > o.version)
      AND NOT EXISTS (SELECT FROM rota.workflow_run r WHERE r.pk_workflow = o.pk_workflow)
    ORDER BY o.pk_workflow LIMIT $2::int FOR UPDATE SKIP LOCKED
  ) AS old WHERE w.pk_workflow = old.pk_workflow RETURNING 1
)
SELECT count(*) FROM gone
