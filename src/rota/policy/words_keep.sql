-- Keep words by their digests $1; those that are there stay as they are.
INSERT INTO rota.policy_word (digest, told)
SELECT given.digest, given.told FROM unnest($1::bytea[], $2::bytea[]) AS given (digest, told)
WHERE NOT EXISTS (SELECT FROM rota.policy_word w WHERE w.digest = given.digest)
ORDER BY given.digest
ON CONFLICT DO NOTHING
