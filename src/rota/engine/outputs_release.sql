-- Let the output of attempt $3 of frame $2 of layer $1 be read, as it is or, with $6, as it was: at $5, with the files $7.
UPDATE rota.frame_end e SET
  state = 'SUCCEEDED', output = NULL, code = NULL, error = NULL,
  value = CASE WHEN $6::boolean THEN NULL ELSE e.value END,
  value_at = CASE WHEN $6 THEN $5::text ELSE e.value_at END,
  artifacts = CASE WHEN NOT $6 THEN e.artifacts WHEN $7::text <> '' THEN string_to_array($7, E'\n') END,
  checks = coalesce(e.checks, '[]') || $8::jsonb
WHERE e.pk_layer = $1::uuid AND e.frame = $2::integer AND e.token = $3::bigint AND e.ts_finished >= $4::timestamptz
  AND e.output IS NOT NULL
