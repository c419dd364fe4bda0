-- The frame of layers $1 that failed first, if any did; of attempts that were tried again nothing is told.
SELECT e.pk_layer AS layer, e.frame, e.attempt, e.state, e.code, e.error, w.str_name AS worker,
       coalesce(e.ts_ended, e.ts_finished) AS at
FROM unnest($1::uuid[]) AS of (layer)
CROSS JOIN LATERAL (
  SELECT * FROM rota.frame_end f
  WHERE f.pk_layer = of.layer AND f.state NOT IN ('SUCCEEDED', 'RETRIED', 'RETURNED') ORDER BY f.ts_finished LIMIT 1
) AS e
LEFT JOIN rota.worker w ON w.pk_host = e.pk_host
ORDER BY e.ts_finished LIMIT 1
