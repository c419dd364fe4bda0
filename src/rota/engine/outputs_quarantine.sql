-- Quarantine the outputs of frames that succeeded, with why ($5) and checks ($6), and say which.
UPDATE rota.frame_end e SET
  state = 'OUTPUT_QUARANTINED', output = 'quarantined', code = 'output_quarantined_async', error = g.why,
  checks = coalesce(e.checks, '[]') || g.said
FROM unnest($1::uuid[], $2::integer[], $3::bigint[], $4::timestamptz[], $5::text[], $6::jsonb[])
  AS g (layer, frame, token, ended, why, said)
WHERE e.pk_layer = g.layer AND e.frame = g.frame AND e.token = g.token AND e.ts_finished >= g.ended
  AND e.state = 'SUCCEEDED'
RETURNING e.token
