-- What the first dead letter of job $1 says.
SELECT d.reason, d.error FROM rota.dlq_entries d WHERE d.job_id = $1::uuid ORDER BY d.dlq_id LIMIT 1
