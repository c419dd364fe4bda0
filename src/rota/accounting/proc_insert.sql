-- Insert procs of show $1 booked under fence $2: what groups have in common, the groups, then runs of tokens of theirs.
SELECT owner, token, why
FROM rota.proc_insert($1::uuid, $2::bigint,
  ARRAY(SELECT ROW(s.alloc, s.folder, g.job, g.layer, s.dept, s.host, s.cores, s.gpus)::rota.ledger_group
        FROM unnest($9::integer[], $10::uuid[], $11::uuid[]) WITH ORDINALITY AS g (shape, job, layer, place)
        JOIN unnest($3::uuid[], $4::uuid[], $5::uuid[], $6::uuid[], $7::bigint[], $8::bigint[])
          WITH ORDINALITY AS s (alloc, folder, dept, host, cores, gpus, place) ON s.place = g.shape ORDER BY g.place),
  ARRAY(SELECT ROW(r.owner, r.first, r.last)::rota.ledger_run
        FROM unnest($12::integer[], $13::bigint[], $14::bigint[])
          WITH ORDINALITY AS r (owner, first, last, place) ORDER BY r.place))
