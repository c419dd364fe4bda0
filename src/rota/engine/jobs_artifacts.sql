-- Artifacts of frames of layer $1, from frame $2 on; of the last attempt, if that succeeded and they may be read.
SELECT frame, attempt, artifacts FROM (
  SELECT DISTINCT ON (frame) frame, attempt, state, artifacts, output FROM rota.frame_end
  WHERE pk_layer = $1::uuid AND frame >= $2::int AND state NOT IN ('RETRIED', 'RETURNED')
  ORDER BY frame, attempt DESC, ts_finished DESC
) AS last
WHERE state = 'SUCCEEDED' AND artifacts IS NOT NULL AND rota.output_readable(output)
ORDER BY frame LIMIT $3::int
