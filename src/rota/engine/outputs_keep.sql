-- Write down outputs that are kept back or redacted; one that is known comes into its new state.
INSERT INTO rota.output AS o (token, pk_layer, frame, pk_job, pk_show, state, severity, rule, reason, meta, original, ts_ended)
SELECT g.token, g.layer, g.frame, g.job, g.show, g.state, g.severity, g.rule, g.reason, g.meta,
       CASE WHEN g.original <> '' THEN string_to_array(g.original, E'\n') END, coalesce(g.ended, now())
FROM unnest($1::bigint[], $2::uuid[], $3::integer[], $4::uuid[], $5::uuid[], $6::text[], $7::text[], $8::text[], $9::text[],
            $10::bytea[], $11::text[], $12::timestamptz[])
  AS g (token, layer, frame, job, show, state, severity, rule, reason, meta, original, ended)
ORDER BY g.token
ON CONFLICT (token) DO UPDATE SET
  state = excluded.state, severity = excluded.severity, rule = excluded.rule, reason = excluded.reason,
  original = coalesce(o.original, excluded.original), ts_decided = clock_timestamp()
