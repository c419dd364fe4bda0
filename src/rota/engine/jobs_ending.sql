-- Jobs that are being ended and have not ended, $1 of those after $3, without $2.
SELECT pk_job FROM rota.job
WHERE ends_as IS NOT NULL AND pk_job > $3::uuid AND pk_job <> ALL ($2::uuid[]) ORDER BY pk_job LIMIT $1::integer
