-- The version $3 of workflow $2 in show $1, or the latest when $3 is 0.
SELECT w.pk_workflow, w.version, w.spec, w.digest, s.pk_show
FROM rota.show s LEFT JOIN LATERAL (
  SELECT * FROM rota.workflow w WHERE w.pk_show = s.pk_show AND w.name = $2::text AND ($3::int = 0 OR w.version = $3)
  ORDER BY w.version DESC LIMIT 1) AS w ON true
WHERE s.str_name = $1::text
