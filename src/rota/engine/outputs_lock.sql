-- How the end of attempt $3 of frame $2 of layer $1 is, for whoever is about to change it.
SELECT e.state, e.output, e.value, e.value_at, e.artifacts FROM rota.frame_end e
WHERE e.pk_layer = $1::uuid AND e.frame = $2::integer AND e.token = $3::bigint AND e.ts_finished >= $4::timestamptz
FOR UPDATE
