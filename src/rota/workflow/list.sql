-- Up to $5 runs before run $4, the newest first, of shows $1 by name or $6 by id, workflow $2 and state $3; null: any.
SELECT r.pk_run, s.str_name AS show, w.name, w.version, r.state, r.error, r.ts_started, r.ts_ended
FROM rota.workflow_run r JOIN rota.workflow w USING (pk_workflow) JOIN rota.show s ON s.pk_show = r.pk_show
WHERE ($1::text[] IS NULL OR s.str_name = ANY ($1)) AND ($2::text IS NULL OR w.name = $2)
  AND ($3::text IS NULL OR r.state = $3) AND ($4::uuid IS NULL OR r.pk_run < $4)
  AND ($6::uuid[] IS NULL OR r.pk_show = ANY ($6))
ORDER BY r.pk_run DESC LIMIT $5::int
