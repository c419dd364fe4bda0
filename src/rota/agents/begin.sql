-- Take runs, under the member's lease $1 with fence $2, for those of the agents $4 that may begin; $3 is who we are.
SELECT name, verdict, due_ms, slot_ms, streak, backfill, token
FROM rota.agents_begin($1::text, $2::bigint, $3::text, $4::text[], $5::bigint[], $6::bigint, $7::bigint[])
