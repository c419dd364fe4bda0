-- Write jobs with all that belongs to them; a row for each that was there before, or for what keeps all from being written.
SELECT at, outcome, pk_job, state FROM rota.job_submit(
  $1::text[], $2::text[], $3::text[], $4::bytea[], $5::smallint[],
  $6::int[], $7::text[], $8::text[], $9::smallint[], $10::text[], $11::text[], $12::smallint[], $13::jsonb[],
  $14::bytea[], $15::bigint[], $16::bigint[], $17::timestamptz[], $18::bytea[], $19::timestamptz,
  $20::int[], $21::smallint[], $22::text[], $23::bytea[], $24::int[], $25::int[], $26::int[], $27::text[],
  $28::boolean[],
  $29::uuid[], $30::int[], $31::text[], $32::text[], $33::bytea[],
  $34::uuid[], $35::int[], $36::int[], $37::bytea[], $38::text[],
  $39::int[], $40::uuid[], $41::uuid[], $42::int[], $43::int[], $44::bytea[], $45::timestamptz[],
  $46::uuid[], $47::uuid[], $48::int[], $49::int[], $50::bigint[], $51::bigint[],
  $52::uuid[], $53::bytea[])
