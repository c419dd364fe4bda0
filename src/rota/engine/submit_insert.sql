-- Write jobs with all that belongs to them; a row for each that was there before, or for what keeps all from being written.
SELECT at, outcome, pk_job, state FROM rota.job_submit(
  $1::text[], $2::text[], $3::text[], $4::bytea[], $5::smallint[],
  $6::int[], $7::text[], $8::text[], $9::smallint[], $10::text[], $11::text[], $12::smallint[], $13::jsonb[],
  $14::bytea[], $15::text[], $16::bigint[], $17::bigint[], $18::timestamptz[],
  $19::int[], $20::smallint[], $21::text[], $22::bytea[], $23::int[], $24::int[], $25::int[], $26::text[],
  $27::boolean[],
  $28::uuid[], $29::int[], $30::text[], $31::bytea[],
  $32::uuid[], $33::int[], $34::int[], $35::bytea[], $36::text[],
  $37::int[], $38::uuid[], $39::uuid[], $40::int[], $41::int[], $42::bytea[], $43::timestamptz[],
  $44::uuid[], $45::uuid[], $46::int[], $47::int[], $48::bigint[], $49::bigint[],
  $50::uuid[], $51::bytea[])
