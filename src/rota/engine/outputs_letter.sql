-- The dead letter of an output, by its cause.
SELECT dlq_id AS id FROM rota.dlq_entries WHERE kind = 'output' AND cause = $1::text
