-- Remove dead letters that agree with the filter, at most $7; frames go back to their lanes if $8.
SELECT id FROM rota.queue_dlq_remove(ARRAY(
  SELECT d.dlq_id FROM rota.dlq_entries d
  WHERE ($1::bigint[] IS NULL OR d.dlq_id = ANY ($1)) AND ($2::text IS NULL OR d.kind = $2)
  AND ($3::text IS NULL OR d.reason = $3) AND ($4::text IS NULL OR d.queue = $4)
  AND ($5::uuid IS NULL OR d.job_id = $5) AND ($6::timestamptz IS NULL OR d.created_at < $6)
  ORDER BY d.dlq_id LIMIT $7::int), $8::boolean) AS id
