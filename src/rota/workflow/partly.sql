-- Those of the jobs $1 some frames of which have succeeded.
SELECT d.pk_job FROM rota.job_done d
WHERE d.pk_job = ANY ($1::uuid[]) AND EXISTS (SELECT FROM unnest(d.layers) AS l WHERE l.succeeded > 0)
