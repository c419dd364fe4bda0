-- How many dead letters agree with the filter.
SELECT count(*) FROM rota.dlq_entries d
WHERE ($1::bigint[] IS NULL OR d.dlq_id = ANY ($1)) AND ($2::text IS NULL OR d.kind = $2)
  AND ($3::text IS NULL OR d.reason = $3) AND ($4::text IS NULL OR d.queue = $4)
  AND ($5::uuid IS NULL OR d.job_id = $5) AND ($6::timestamptz IS NULL OR d.created_at < $6)
