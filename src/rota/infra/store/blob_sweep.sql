-- Remove from the default partition what was put before $1 and is not in use, $3 at most.
DELETE FROM rota.blob_default WHERE ctid = ANY (ARRAY(
  SELECT ctid FROM rota.blob_default WHERE ts_put < $1::timestamptz AND sha256 <> ALL ($2::bytea[]) LIMIT $3::int))
