-- How frames of layer $1 ended, from frame $2 on; attempts that are tried again are no end.
-- What a frame returned and left is there for everybody, or not at all: see rota.model.output.unreadable.
SELECT DISTINCT ON (frame) frame, attempt, token, state, code, error, took_ms, pk_host AS worker, output,
       CASE WHEN rota.output_readable(output) THEN value END AS value,
       CASE WHEN rota.output_readable(output) THEN value_at END AS value_at,
       CASE WHEN rota.output_readable(output) THEN artifacts END AS artifacts,
       coalesce(ts_ended, ts_finished) AS finished_at
FROM rota.frame_end WHERE pk_layer = $1::uuid AND frame >= $2::int AND state NOT IN ('RETRIED', 'RETURNED')
ORDER BY frame, attempt DESC, ts_finished DESC LIMIT $3::int
