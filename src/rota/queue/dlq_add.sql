-- Write dead letters; a cause that is known is left as it is.
WITH added AS (
  INSERT INTO rota.dlq_entries (kind, reason, cause, queue, job_id, payload, error)
  SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::uuid[], $6::bytea[], $7::text[])
  ON CONFLICT (kind, cause) DO NOTHING
  RETURNING 1
)
SELECT count(*) FROM added
