-- Put another result in the place of what attempt $3 of frame $2 of layer $1 returned, if it is still that attempt's.
UPDATE rota.frame_end SET value = $4::bytea, value_at = $5::text
WHERE pk_layer = $1::uuid AND frame = $2::int AND token = $3::bigint
  AND NOT EXISTS (SELECT FROM rota.frame_end later
                  WHERE later.pk_layer = $1 AND later.frame = $2 AND later.attempt > frame_end.attempt)
