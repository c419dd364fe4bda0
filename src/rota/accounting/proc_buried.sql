-- Those of the tokens of show $1 that lie in a grave, as one array; the tokens come as runs.
SELECT ARRAY(
  SELECT b.token
  FROM rota.proc_buried($1::uuid, ARRAY(SELECT ROW(0, run.first, run.last)::rota.ledger_run
                                        FROM unnest($2::bigint[], $3::bigint[]) AS run (first, last))) AS b
)
