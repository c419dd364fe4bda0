-- Frames of layer $1, from frame $2 on, whose outputs are kept back, at most $3; with $4, those that left that file.
SELECT frame, output FROM (
  SELECT DISTINCT ON (frame) frame, output, artifacts FROM rota.frame_end
  WHERE pk_layer = $1::uuid AND frame >= $2::int AND state NOT IN ('RETRIED', 'RETURNED')
  ORDER BY frame, attempt DESC, ts_finished DESC
) AS last
WHERE NOT rota.output_readable(output)
  AND ($4::text IS NULL OR EXISTS (SELECT FROM unnest(artifacts) AS word WHERE split_part(word, ' ', 1) = $4))
ORDER BY frame LIMIT $3::int
