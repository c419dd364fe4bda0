-- Every pointer into the store that a live job, or the end of a frame that is kept, refers to.
SELECT pointer FROM (
  SELECT input_at AS pointer FROM rota.layer WHERE input_at IS NOT NULL
  UNION SELECT value_at FROM rota.frame_end WHERE value_at IS NOT NULL
  UNION SELECT unnest(artifacts) FROM rota.frame_end WHERE artifacts IS NOT NULL
) AS used WHERE pointer ~ '^(pg|file):[0-9a-f]{64}:[0-9]+$'
