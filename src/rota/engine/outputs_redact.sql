-- Put $5, or the pointer $6, and the files $7 (a line each) in the place of what attempt $3 of frame $2 of layer $1 left.
UPDATE rota.frame_end e SET
  state = 'SUCCEEDED', output = 'redacted', value = $5::bytea, value_at = $6::text,
  artifacts = CASE WHEN $7::text <> '' THEN string_to_array($7, E'\n') END,
  code = NULL, error = NULL, checks = coalesce(e.checks, '[]') || $8::jsonb
WHERE e.pk_layer = $1::uuid AND e.frame = $2::integer AND e.token = $3::bigint AND e.ts_finished >= $4::timestamptz
  AND e.state IN ('SUCCEEDED', 'OUTPUT_QUARANTINED')
