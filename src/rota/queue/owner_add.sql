-- A dispatcher that holds the lease $2 under the fence $1 may claim.
INSERT INTO rota.queue_owners (owner, lease) VALUES ($1::bigint, $2::text) ON CONFLICT DO NOTHING
