-- How frames of layer $1 ended, from frame $2 on; attempts that are tried again are no end.
SELECT DISTINCT ON (frame) frame, attempt, token, state, value, value_at, code, error, took_ms, pk_host AS worker,
       artifacts, coalesce(ts_ended, ts_finished) AS finished_at
FROM rota.frame_end WHERE pk_layer = $1::uuid AND frame >= $2::int AND state NOT IN ('RETRIED', 'RETURNED')
ORDER BY frame, attempt DESC, ts_finished DESC LIMIT $3::int
