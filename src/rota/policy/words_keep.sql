-- Keep words by their digests $1; those that are there stay as they are. $3: how many jobs of a show they let run at a time.
INSERT INTO rota.policy_word (digest, told, jobs_max)
SELECT given.digest, given.told, given.jobs_max
FROM unnest($1::bytea[], $2::bytea[], $3::integer[]) AS given (digest, told, jobs_max)
WHERE NOT EXISTS (SELECT FROM rota.policy_word w WHERE w.digest = given.digest)
ORDER BY given.digest
ON CONFLICT DO NOTHING
