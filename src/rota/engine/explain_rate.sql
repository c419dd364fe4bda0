-- How many jobs and frames of show $1 ended lately: the last $2 of an hour, and how long ago the first of them did.
SELECT count(*) AS jobs, coalesce(sum(d.frames), 0)::bigint AS frames,
       coalesce(extract(epoch FROM clock_timestamp() - min(d.ts_finished)), 0)::float8 AS span_s
FROM (
  SELECT j.ts_finished,
         (SELECT sum(l.succeeded + l.quarantined + l.failed + l.timed_out) FROM unnest(j.layers) AS l) AS frames
  FROM rota.job_done j
  WHERE j.pk_show = $1::uuid AND j.ts_finished > clock_timestamp() - interval '1 hour'
  ORDER BY j.ts_finished DESC LIMIT $2::integer
) AS d
