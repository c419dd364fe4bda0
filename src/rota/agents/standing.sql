-- What is known of the agents $1: their present run, and when they are due (ms); null when they wait for nothing.
SELECT a.name, r.run, CASE WHEN NOT a.paused THEN (extract(epoch FROM a.ts_next) * 1000)::bigint END AS due_ms
FROM rota.agent a LEFT JOIN rota.agent_running r ON r.name = a.name
WHERE a.name = ANY ($1::text[])
