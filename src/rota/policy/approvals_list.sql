-- Approvals in state $1, of kind $2 and of shows $3 (null: any), behind the one $4, the oldest first; at most $5.
SELECT a.pk_approval FROM rota.approval a
WHERE ($1::text IS NULL OR a.state = $1) AND ($2::text IS NULL OR a.kind = $2)
  AND ($3::uuid[] IS NULL OR a.pk_show = ANY ($3))
  AND ($4::uuid IS NULL OR (a.ts_requested, a.pk_approval) > (SELECT b.ts_requested, b.pk_approval FROM rota.approval b
                                                              WHERE b.pk_approval = $4))
ORDER BY a.ts_requested, a.pk_approval LIMIT $5::integer
