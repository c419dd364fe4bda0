-- Wake whoever runs agents.
SELECT pg_notify('rota_agents', $1)
