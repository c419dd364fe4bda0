-- Live jobs called $1, a few of them.
SELECT pk_job AS id FROM rota.job WHERE str_name = $1::text ORDER BY pk_job DESC LIMIT 6
