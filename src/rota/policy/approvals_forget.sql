-- Remove approvals that were decided $1 seconds ago or before, at most $2.
DELETE FROM rota.approval WHERE pk_approval IN (
  SELECT a.pk_approval FROM rota.approval a
  WHERE a.state <> 'pending' AND a.ts_decided < clock_timestamp() - make_interval(secs => $1::float8) LIMIT $2::integer)
