-- Dead letters that agree with the filter, from the one after $7 on, at most $8.
SELECT d.dlq_id AS id, d.kind, d.reason, d.cause, d.queue, d.job_id AS job, d.layer_id AS layer, d.frame, d.attempt,
       d.payload, d.error, d.created_at
FROM rota.dlq_entries d
WHERE ($1::bigint[] IS NULL OR d.dlq_id = ANY ($1)) AND ($2::text IS NULL OR d.kind = $2)
  AND ($3::text IS NULL OR d.reason = $3) AND ($4::text IS NULL OR d.queue = $4)
  AND ($5::uuid IS NULL OR d.job_id = $5) AND ($6::timestamptz IS NULL OR d.created_at < $6)
  AND d.dlq_id > $7::bigint
ORDER BY d.dlq_id
LIMIT $8::int
