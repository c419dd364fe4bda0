-- Dead letters of frames by what went wrong.
SELECT dlq_id AS id FROM rota.dlq_entries WHERE kind = 'frame' AND cause = ANY ($1::text[]) ORDER BY dlq_id
