-- What run $1 has not heard of yet, when it was paused, and which server leads, by the lease $2.
SELECT (SELECT count(*) FROM rota.workflow_news n WHERE n.workflow_id = $1::uuid::text) AS news,
       ARRAY(SELECT s.pk_job FROM rota.workflow_news n JOIN rota.scan s USING (pk_job)
             WHERE n.workflow_id = $1::uuid::text ORDER BY 1 LIMIT 5) AS scanned,
       (SELECT count(*) FROM rota.workflow_timer t WHERE t.pk_run = $1::uuid AND t.ts_due <= clock_timestamp()) AS due,
       (SELECT l.holder FROM rota.lease l WHERE l.name = $2::text AND l.expires_at > clock_timestamp()) AS leader,
       p.at AS paused_at, p.told::text AS paused, clock_timestamp() AS now
FROM (SELECT) AS one LEFT JOIN LATERAL (
  SELECT e.at, e.told FROM rota.workflow_event e WHERE e.pk_run = $1::uuid AND e.told @> '[{"what": "paused"}]'
  ORDER BY e.fence DESC LIMIT 1) AS p ON true
