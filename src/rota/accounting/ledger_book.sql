-- Book on the five tables of show $1, asking no limit if $2: what groups share, the groups, their tokens.
SELECT owner, token, why, fit, level, resource, current, cap
FROM rota.ledger_book($1::uuid,
  ARRAY(SELECT ROW(s.alloc, s.folder, g.job, g.layer, s.dept, s.host, s.cores, s.gpus)::rota.ledger_group
        FROM unnest($9::integer[], $10::uuid[], $11::uuid[]) WITH ORDINALITY AS g (shape, job, layer, place)
        JOIN unnest($3::uuid[], $4::uuid[], $5::uuid[], $6::uuid[], $7::bigint[], $8::bigint[])
          WITH ORDINALITY AS s (alloc, folder, dept, host, cores, gpus, place) ON s.place = g.shape ORDER BY g.place),
  ARRAY(SELECT ROW(r.owner, r.first, r.last)::rota.ledger_run
        FROM unnest($12::integer[], $13::bigint[], $14::bigint[])
          WITH ORDINALITY AS r (owner, first, last, place) ORDER BY r.place),
  $2::boolean)
