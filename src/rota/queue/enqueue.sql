-- Append entries to their lanes; a row per group with the lane and its first turn.
SELECT lane_id, first_seq FROM rota.queue_enqueue(
  $1::text[], $2::smallint[], $3::text[], $4::int[],
  $5::uuid[], $6::uuid[], $7::int[], $8::int[], $9::smallint[], $10::bytea[], $11::boolean)
