-- Let go on what waits for jobs $1, if they have ended and nothing of them is held any more.
SELECT rota.jobs_release(ARRAY(SELECT b FROM unnest($1::uuid[]) AS b
                               WHERE NOT EXISTS (SELECT FROM rota.job j WHERE j.pk_job = b))) AS waiting
WHERE EXISTS (SELECT FROM rota.job_after a WHERE a.pk_before = ANY ($1))
