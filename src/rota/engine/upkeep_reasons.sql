-- How many live jobs wait for something other than a turn of their own, by why.
SELECT w.reason, count(*) AS jobs
FROM (
  SELECT CASE WHEN ends_as IS NOT NULL THEN 'ending' WHEN state = 'APPROVAL_REQUIRED' THEN 'approval_required'
              ELSE coalesce(reason, 'policy_pending') END AS reason
  FROM rota.job WHERE state IN ('PENDING', 'APPROVAL_REQUIRED') OR ends_as IS NOT NULL
  UNION ALL
  SELECT CASE WHEN j.reason = 'tenant_limit' THEN 'tenant_limit' ELSE 'quota_job' END
  FROM (SELECT DISTINCT parked_job FROM rota.queue_returned WHERE parked_job IS NOT NULL) AS p
  JOIN rota.job j ON j.pk_job = p.parked_job AND j.ends_as IS NULL
  UNION ALL
  SELECT 'deferred' FROM (SELECT DISTINCT job_id FROM rota.deferred_jobs) AS d
) AS w
GROUP BY w.reason
