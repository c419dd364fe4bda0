-- The last end of each frame of layer $1 from frame $2 on.
SELECT DISTINCT ON (frame) frame, attempt, token, state, value, value_at, code, error, took_ms, pk_host AS worker,
       artifacts, coalesce(ts_ended, ts_finished) AS finished_at
FROM rota.frame_end WHERE pk_layer = $1::uuid AND frame >= $2::int
ORDER BY frame, attempt DESC, ts_finished DESC LIMIT $3::int
