-- Which of the jobs $1, runs $2 and approvals $3 that steps wait for are over, or gone, without anybody being told.
WITH told AS MATERIALIZED (SELECT pk_job FROM rota.workflow_news WHERE pk_job IS NOT NULL)
SELECT 'job' AS kind, g.id FROM unnest($1::uuid[]) AS g (id)
WHERE NOT EXISTS (SELECT FROM rota.job j WHERE j.pk_job = g.id) AND g.id NOT IN (SELECT pk_job FROM told)
UNION ALL
SELECT 'run', g.id FROM unnest($2::uuid[]) AS g (id)
WHERE NOT EXISTS (SELECT FROM rota.workflow_run r WHERE r.pk_run = g.id AND r.ts_ended IS NULL)
  AND g.id NOT IN (SELECT pk_job FROM told)
UNION ALL
SELECT 'approval', g.id FROM unnest($3::uuid[]) AS g (id)
WHERE NOT EXISTS (SELECT FROM rota.approval a WHERE a.pk_approval = g.id AND a.state = 'pending')
  AND g.id NOT IN (SELECT pk_job FROM told)
