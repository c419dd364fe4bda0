-- Lock those of the runs $1 that nobody has advanced since they had the fences $2, and nobody is at.
SELECT r.pk_run FROM rota.workflow_run r JOIN unnest($1::uuid[], $2::bigint[]) AS g (pk_run, fence) USING (pk_run, fence)
WHERE r.ts_ended IS NULL ORDER BY r.pk_run FOR NO KEY UPDATE OF r SKIP LOCKED
