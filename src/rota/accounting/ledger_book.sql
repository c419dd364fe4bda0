-- Book on the five tables of show $1, asking no limit if $2: charges and hosts of the groups, then runs of tokens.
SELECT owner, token, why, fit, level, resource, current, cap
FROM rota.ledger_book($1::uuid,
  ARRAY(SELECT ROW(g.alloc, g.folder, g.job, g.layer, g.dept, g.host, g.cores, g.gpus)::rota.ledger_group
        FROM unnest($3::uuid[], $4::uuid[], $5::uuid[], $6::uuid[], $7::uuid[], $8::uuid[], $9::bigint[], $10::bigint[])
          WITH ORDINALITY AS g (alloc, folder, job, layer, dept, host, cores, gpus, place) ORDER BY g.place),
  ARRAY(SELECT ROW(r.owner, r.first, r.last)::rota.ledger_run
        FROM unnest($11::integer[], $12::bigint[], $13::bigint[])
          WITH ORDINALITY AS r (owner, first, last, place) ORDER BY r.place),
  $2::boolean)
