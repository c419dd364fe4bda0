-- Jobs $1 from state $2 to state $3 for the reason $4, without queueing; a row for each that was in that state.
WITH held AS (
  SELECT pk_job FROM rota.job WHERE pk_job = ANY ($1::uuid[]) AND state = $2::text ORDER BY pk_job FOR UPDATE
)
UPDATE rota.job j
SET state = $3::text, reason = $4::text, ts_updated = clock_timestamp(),
    history = CASE WHEN (j.state, j.reason) IS NOT DISTINCT FROM ($3, $4) THEN j.history ELSE j.history ||
      jsonb_build_array(jsonb_build_array($3, floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint, $4)) END
FROM held WHERE j.pk_job = held.pk_job
RETURNING j.pk_job AS id
