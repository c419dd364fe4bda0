-- Write a new version of workflow $2 in show $1, unless the latest is the same.
WITH latest AS (
  SELECT w.pk_workflow, w.version, w.digest FROM rota.workflow w WHERE w.pk_show = $1::uuid AND w.name = $2::text
  ORDER BY w.version DESC LIMIT 1
), made AS (
  INSERT INTO rota.workflow (pk_show, name, version, digest, spec)
  SELECT $1::uuid, $2::text, coalesce((SELECT version FROM latest), 0) + 1, $3::bytea, $4::bytea
  WHERE NOT EXISTS (SELECT FROM latest WHERE digest = $3::bytea)
  RETURNING pk_workflow, version
)
SELECT pk_workflow, version, true AS made FROM made
UNION ALL
SELECT pk_workflow, version, false FROM latest WHERE digest = $3::bytea
