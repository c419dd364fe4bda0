-- A vote on approval $1 by $2, who agrees or not, $3, for the reason $4; a vote that is there stays.
INSERT INTO rota.approval_vote (pk_approval, voter, agrees, reason) VALUES ($1::uuid, $2::text, $3::boolean, $4::text)
ON CONFLICT DO NOTHING
