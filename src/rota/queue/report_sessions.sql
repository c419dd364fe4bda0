-- Sessions in a transaction for longer than $1 seconds that keep dead rows alive or use tables of a slot.
SELECT a.pid, a.application_name AS application,
       extract(epoch FROM clock_timestamp() - a.xact_start)::float8 AS age_s, a.state,
       a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL AS pins, coalesce(h.slots, '{}') AS slots
FROM pg_stat_activity a
LEFT JOIN (
  SELECT l.pid, array_agg(DISTINCT right(c.relname, 1)::int) AS slots
  FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
  WHERE l.granted AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
    AND c.relnamespace = 'rota'::regnamespace
    AND c.relname ~ '^(ready_entries|queue_claims|queue_closures)_[0-7]$'
  GROUP BY 1
) AS h ON h.pid = a.pid
WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
  AND a.xact_start < clock_timestamp() - make_interval(secs => $1::float8)
  AND (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL OR h.slots IS NOT NULL)
ORDER BY a.xact_start
