-- Those of the agents $1 that wait for their time and have no run, with their due times in ms.
SELECT a.name, (extract(epoch FROM a.ts_next) * 1000)::bigint AS due_ms
FROM rota.agent a
WHERE a.name = ANY ($1::text[]) AND NOT a.paused AND a.ts_next IS NOT NULL
  AND NOT EXISTS (SELECT FROM rota.agent_running r WHERE r.name = a.name)
ORDER BY a.ts_next, a.name
