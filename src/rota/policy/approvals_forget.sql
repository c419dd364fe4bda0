-- Remove approvals that were decided before $1, at most $2.
DELETE FROM rota.approval WHERE pk_approval IN (
  SELECT a.pk_approval FROM rota.approval a
  WHERE a.state <> 'pending' AND a.ts_decided < $1::timestamptz LIMIT $2::integer)
