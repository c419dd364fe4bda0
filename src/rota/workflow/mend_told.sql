-- Write news of kind $3 for runs $1 in shows $2, of what has the ids $4, in states $5, for reasons $6, in the ways $7.
INSERT INTO rota.workflow_news (kind, workflow_id, pk_show, pk_job, state, reason, request)
SELECT g.kind, g.pk_run::text, g.pk_show, g.id, g.state, g.reason, convert_to(g.way, 'UTF8')
FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::uuid[], $5::text[], $6::text[], $7::text[])
  AS g (pk_run, pk_show, kind, id, state, reason, way)
