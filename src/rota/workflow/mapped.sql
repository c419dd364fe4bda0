-- What the frames of layers $1 returned, in order; of a frame that returned nothing there is no row.
SELECT DISTINCT ON (pk_layer, frame) pk_layer, frame, state, CASE WHEN rota.output_readable(output) THEN value END AS value,
       CASE WHEN rota.output_readable(output) THEN value_at END AS value_at, code, error
FROM rota.frame_end
WHERE pk_layer = ANY ($1::uuid[]) AND state NOT IN ('RETRIED', 'RETURNED')
ORDER BY pk_layer, frame, attempt DESC, ts_finished DESC
