-- These jobs could not be dispatched once more, because of $2; how often that was by now.
-- Frames that fail while the pause after the last failure is still on are one failure with it: an outage that meets a large
-- layer frame by frame must not use up its tries. After ten minutes without a failure it is counted anew.
UPDATE rota.job j SET
  dispatch_failures = CASE WHEN sorted.forgiven THEN 1 ELSE least(j.dispatch_failures + sorted.counts::integer, 32767) END,
  reason = $2::text, ts_updated = CASE WHEN sorted.counts THEN clock_timestamp() ELSE j.ts_updated END
FROM (SELECT pk_job, ts_updated + interval '10 minutes' <= clock_timestamp() AS forgiven,
             dispatch_failures = 0 OR ts_updated + least(power(2, dispatch_failures - 1), 30) * interval '1 second'
                                      <= clock_timestamp() AS counts
      FROM rota.job WHERE pk_job = ANY ($1::uuid[]) ORDER BY pk_job FOR NO KEY UPDATE) AS sorted
WHERE j.pk_job = sorted.pk_job
RETURNING j.pk_job, j.dispatch_failures
