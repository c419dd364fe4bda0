-- Forget an agent and its history, unless it runs on a replica that is not gone since $2 seconds.
WITH living AS (
  SELECT FROM rota.agent_running r WHERE r.name = $1 AND rota.agents_member_lives(r.lease, r.fence, $2::float8)
), lost AS (
  DELETE FROM rota.agent_running r WHERE r.name = $1 AND NOT EXISTS (SELECT FROM living)
)
DELETE FROM rota.agent a WHERE a.name = $1 AND NOT EXISTS (SELECT FROM living)
