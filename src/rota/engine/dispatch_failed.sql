-- These jobs could not be dispatched once more, because of $2; how often that was by now.
-- The pause after a failure doubles from $3 s to $4 s. Frames that fail while it is still on are one failure with the last:
-- an outage that meets a large layer frame by frame must not use up its tries. Ten minutes after it failures are counted anew.
UPDATE rota.job j SET
  dispatch_failures = CASE WHEN sorted.ts_again + interval '10 minutes' <= clock_timestamp() THEN 1
                           ELSE least(j.dispatch_failures + sorted.counts::integer, 32767) END,
  reason = $2::text, ts_updated = CASE WHEN sorted.counts THEN clock_timestamp() ELSE j.ts_updated END
FROM (SELECT pk_job, ts_again, dispatch_failures = 0 OR ts_again <= clock_timestamp() AS counts
      FROM rota.job CROSS JOIN LATERAL (
        SELECT ts_updated + interval '1 second'
               * least($3::float8 * power(2, least(greatest(dispatch_failures - 1, 0), 64)), $4::float8)) pause (ts_again)
      WHERE pk_job = ANY ($1::uuid[]) ORDER BY pk_job FOR NO KEY UPDATE OF job) AS sorted
WHERE j.pk_job = sorted.pk_job
RETURNING j.pk_job, j.dispatch_failures
