-- Pointers into the store that are in use and may be older than $1.
-- Those of live jobs, of jobs that lived across a midnight, and of ends of frames that were carried on or lie next to it.
SELECT input_at AS pointer FROM rota.layer WHERE input_at IS NOT NULL
UNION SELECT l.input_at FROM rota.job_done d CROSS JOIN LATERAL unnest(d.layers) AS l
  WHERE d.ts_submitted < $1::timestamptz + interval '1 day' AND l.input_at IS NOT NULL
    AND (d.ts_submitted AT TIME ZONE 'UTC')::date < (d.ts_finished AT TIME ZONE 'UTC')::date
UNION SELECT split_part(unnest(e.artifacts || e.value_at), ' ', 1) FROM rota.frame_end e
  WHERE e.ts_ended IS NOT NULL AND (e.value_at IS NOT NULL OR e.artifacts IS NOT NULL)
UNION SELECT split_part(unnest(e.artifacts || e.value_at), ' ', 1) FROM rota.frame_end e
  WHERE e.ts_finished < $1::timestamptz + interval '2 days' AND (e.value_at IS NOT NULL OR e.artifacts IS NOT NULL)
UNION SELECT split_part(unnest(o.original), ' ', 1) FROM rota.output o WHERE o.original IS NOT NULL
