-- Outputs that are held, kept back, redacted or released, the newest first: before $4, at most $5.
-- Of shows $1 (null: of all), in state $2 (null: in any), of job $3 (null: of any).
SELECT o.token AS id, o.pk_job AS job, coalesce(s.str_name, o.pk_show::text) AS show, o.state, o.severity, o.rule, o.reason,
       o.meta, o.at
FROM (
  (SELECT token, pk_job, pk_show, state, severity, rule, reason, meta, ts_decided AS at FROM rota.output
   WHERE ($1::uuid[] IS NULL OR pk_show = ANY ($1)) AND ($2::text IS NULL OR state = $2)
     AND ($3::uuid IS NULL OR pk_job = $3) AND token < $4::bigint
   ORDER BY token DESC LIMIT $5::integer)
  UNION ALL
  (SELECT token, pk_job, pk_show, 'held', NULL, '', '', meta, ts_ended FROM rota.scan
   WHERE mode <> 'pass' AND ($1::uuid[] IS NULL OR pk_show = ANY ($1)) AND ($2::text IS NULL OR $2 = 'held')
     AND ($3::uuid IS NULL OR pk_job = $3) AND token < $4::bigint
   ORDER BY token DESC LIMIT $5::integer)
) AS o LEFT JOIN rota.show s ON s.pk_show = o.pk_show
ORDER BY o.token DESC LIMIT $5::integer
