-- Ids of the $2 newest jobs before $1 that were submitted within the last $3 seconds.
SELECT pk_job AS id FROM rota.jobs_before(NULL, $1::uuid, $2::int)
WHERE ts_submitted > now() - make_interval(secs => $3::float8) ORDER BY pk_job DESC
