-- Forget failed frames that agree with the filter, at most $6; they are no longer counted.
SELECT token FROM rota.queue_discard(ARRAY(
  SELECT d.token FROM rota.done_entries d JOIN rota.queue_lanes l ON l.lane_id = d.lane_id
  WHERE ($1::bigint[] IS NULL OR d.token = ANY ($1)) AND ($2::text IS NULL OR d.reason = $2)
  AND ($3::text IS NULL OR l.queue = $3) AND ($4::uuid IS NULL OR d.job_id = $4)
  AND ($5::timestamptz IS NULL OR d.failed_at < $5)
  ORDER BY d.token LIMIT $6::int), false) AS token
