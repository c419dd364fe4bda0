-- Write new runs; one whose key was used before is not, and comes back as not made.
WITH given AS (
  SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::bigint[], $4::bytea[], $5::bytea[], $6::text[], $7::uuid[], $8::uuid[],
                       $9::smallint[], $10::text[])
    WITH ORDINALITY AS g (pk_run, pk_show, pk_workflow, steps, input, key, pk_parent, pk_root, depth, actor, at)
), made AS (
  INSERT INTO rota.workflow_run (pk_run, pk_show, pk_workflow, state, steps, input, key, pk_parent, pk_root, depth, actor)
  SELECT g.pk_run, g.pk_show, g.pk_workflow, 'RUNNING', g.steps, g.input, g.key, g.pk_parent, g.pk_root, g.depth, g.actor
  FROM given g
  ON CONFLICT (pk_show, key) WHERE key IS NOT NULL DO NOTHING
  RETURNING pk_run
)
SELECT g.at::int AS at, m.pk_run IS NOT NULL AS made, rota.now_ms() AS now_ms
FROM given g LEFT JOIN made m USING (pk_run) ORDER BY g.at
