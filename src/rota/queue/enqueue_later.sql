-- Keep entries until their time has come.
SELECT rota.queue_defer(
  $1::text[], $2::smallint[], $3::timestamptz[],
  $4::uuid[], $5::uuid[], $6::int[], $7::int[], $8::smallint[], $9::bytea[])
