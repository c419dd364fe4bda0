-- Output $1, held or decided about, with what the end of its frame says and names of it.
SELECT o.token AS id, o.pk_job AS job, o.pk_show, coalesce(s.str_name, o.pk_show::text) AS show, o.state, o.severity, o.rule,
       o.reason, o.meta, o.at, o.original, o.pk_layer, o.frame, o.ts_ended, e.state AS frame_state, e.checks, e.value,
       e.value_at, e.artifacts
FROM (
  SELECT token, pk_job, pk_show, pk_layer, frame, state, severity, rule, reason, meta, original, ts_ended, ts_decided AS at
  FROM rota.output WHERE token = $1::bigint
  UNION ALL
  SELECT token, pk_job, pk_show, pk_layer, frame, 'held', NULL, '', '', meta, NULL, ts_ended, ts_ended FROM rota.scan
  WHERE token = $1 AND mode <> 'pass' AND NOT EXISTS (SELECT FROM rota.output o WHERE o.token = $1)
) AS o
LEFT JOIN rota.show s ON s.pk_show = o.pk_show
JOIN rota.frame_end e ON e.pk_layer = o.pk_layer AND e.frame = o.frame AND e.token = o.token AND e.ts_finished >= o.ts_ended
