-- Fail claimed turns for good, each with a reason and what it said.
SELECT claim_id, refused FROM rota.queue_fail($1::bigint[], $2::varbit[], $3::bigint[], $4::text[], $5::text[])
