-- Say that a run of ours cannot be stopped, or can be after all.
UPDATE rota.agent_running r SET quarantined = $3
WHERE r.name = $1 AND r.run = $2
