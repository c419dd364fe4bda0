-- Write what was decided about runs, if nobody has advanced one of them since it was read.
SELECT rota.workflow_write(
  $1::uuid[], $2::bigint[], $3::text[], $4::bytea[], $5::bytea[], $6::text[], $7::boolean[], $8::jsonb[],
  $9::uuid[], $10::smallint[], $11::int[], $12::bigint[], $13::uuid[], $14::smallint[], $15::int[],
  $16::uuid[], $17::smallint[], $18::bytea[], $19::text[])
