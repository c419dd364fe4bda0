-- These jobs could not be dispatched once more; how often that was by now.
UPDATE rota.job j SET dispatch_failures = least(j.dispatch_failures + 1, 32767), reason = $2::text, ts_updated = now()
FROM (SELECT pk_job FROM rota.job WHERE pk_job = ANY ($1::uuid[]) ORDER BY pk_job FOR NO KEY UPDATE) AS sorted
WHERE j.pk_job = sorted.pk_job
RETURNING j.pk_job, j.dispatch_failures
