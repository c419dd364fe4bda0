-- PENDING jobs $1 to states $2 (PENDING or APPROVAL_REQUIRED) for reasons $3 by words $4; a row for each that was PENDING.
-- One that stays PENDING is asked about again after $5 seconds; 0: one second, then twice as long each time, up to 30.
WITH given AS (
  SELECT * FROM unnest($1::uuid[], $2::text[], $3::text[], rota.policy_words($4::bytea[]), $5::float8[])
    AS g (id, state, reason, word, wait_s)
), held AS (
  SELECT j.pk_job FROM rota.job j WHERE j.pk_job = ANY ($1) AND j.state = 'PENDING' ORDER BY j.pk_job FOR UPDATE
)
UPDATE rota.job j
SET state = g.state, reason = g.reason, ts_updated = clock_timestamp(), word = coalesce(g.word, j.word),
    asks = CASE WHEN g.state = 'PENDING' AND g.wait_s = 0 THEN least(coalesce(j.asks, 0) + 1, 100) END,
    ts_ask_at = CASE WHEN g.state = 'PENDING' THEN clock_timestamp() + make_interval(secs =>
      CASE WHEN g.wait_s > 0 THEN g.wait_s ELSE least(30, 2 ^ least(coalesce(j.asks, 0), 10)) END) END,
    history = CASE WHEN (j.state, j.reason) IS NOT DISTINCT FROM (g.state, g.reason) THEN j.history ELSE j.history ||
      jsonb_build_array(jsonb_build_array(g.state, floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint, g.reason)) END
FROM held JOIN given g ON g.id = held.pk_job WHERE j.pk_job = held.pk_job
RETURNING j.pk_job AS id
