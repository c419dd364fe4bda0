-- Have outputs looked into: by token, each with its frame, how it is told to the policy, and what silence means.
INSERT INTO rota.scan (token, pk_layer, frame, pk_job, pk_show, mode, budget_s, meta)
SELECT * FROM unnest($1::bigint[], $2::uuid[], $3::integer[], $4::uuid[], $5::uuid[], $6::text[], $7::real[], $8::bytea[])
