-- Keep what frames wrote.
INSERT INTO rota.frame_log (pk_layer, frame, attempt, token, stream, at, dropped, data, last)
SELECT * FROM unnest($1::uuid[], $2::integer[], $3::smallint[], $4::bigint[], $5::text[], $6::bigint[], $7::bigint[],
                     $8::bytea[], $9::boolean[])
