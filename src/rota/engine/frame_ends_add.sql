-- Remember what attempts returned, or why they failed.
INSERT INTO rota.frame_end
  (pk_layer, frame, attempt, token, state, value, value_at, code, error, took_ms, pk_host, artifacts, output, checks)
SELECT e.layer, e.frame, e.attempt, e.token, e.state, e.value, e.value_at, e.code, e.error, e.took_ms, $11::uuid,
       CASE WHEN e.artifacts <> '' THEN string_to_array(e.artifacts, E'\n') END, e.output, e.checks
FROM unnest($1::uuid[], $2::integer[], $3::smallint[], $4::bigint[], $5::text[], $6::bytea[], $7::text[], $8::text[],
            $9::text[], $10::integer[], $12::text[], $13::text[], $14::jsonb[])
  AS e (layer, frame, attempt, token, state, value, value_at, code, error, took_ms, artifacts, output, checks)
