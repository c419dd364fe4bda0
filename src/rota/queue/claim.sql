-- Hand out up to $2 waiting turns of these lanes to the owner $3; a row per claim.
SELECT lane_id, claim_id, n, first_seq, skipped, sizes, jobs, layers, frames, attempts, payloads
FROM rota.queue_claim($1::int[], $2::int, $3::bigint)
