-- Open turns of claims that the owner $1 made.
SELECT claim_id, open FROM rota.queue_open_claims($1::bigint)
