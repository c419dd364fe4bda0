-- Pieces, at most $6, of what frame $2 of layer $1 wrote, reaching beyond place $5.
-- Of attempt $3 (null: its last that wrote anything), in stream $4 (null: all of them). None while its output is kept back.
SELECT g.attempt, g.stream, g.at, g.dropped, g.data, g.last FROM rota.frame_log g
WHERE g.pk_layer = $1::uuid AND g.frame = $2::integer AND ($4::text IS NULL OR g.stream = $4)
  AND (g.at + length(g.data) > $5::bigint OR g.last)
  AND g.token = (SELECT max(l.token) FROM rota.frame_log l
                 WHERE l.pk_layer = $1 AND l.frame = $2 AND ($3::integer IS NULL OR l.attempt = $3))
  AND NOT EXISTS (SELECT FROM rota.frame_end e
                  WHERE e.pk_layer = $1 AND e.frame = $2 AND e.token = g.token AND NOT rota.output_readable(e.output))
ORDER BY g.stream, g.at, length(g.data) DESC LIMIT $6::integer
