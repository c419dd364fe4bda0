-- Agents that submit a job, which any server can run.
SELECT a.spec::text AS spec FROM rota.agent a WHERE a.spec -> 'job' IS NOT NULL ORDER BY a.name
