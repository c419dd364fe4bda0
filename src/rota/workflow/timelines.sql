-- What happened to the runs $1 after their advances $2; a row without a moment for a run of which nothing did.
SELECT g.pk_run, e.fence, e.at, e.told
FROM unnest($1::uuid[], $2::bigint[]) AS g (pk_run, after)
JOIN rota.workflow_run r USING (pk_run)
LEFT JOIN rota.workflow_event e ON e.pk_run = g.pk_run AND e.fence > g.after
ORDER BY g.pk_run, e.fence
