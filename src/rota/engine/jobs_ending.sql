-- Jobs that are being ended and have not ended.
SELECT pk_job FROM rota.job WHERE ends_as IS NOT NULL ORDER BY pk_job LIMIT $1::integer
