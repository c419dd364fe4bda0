-- Jobs $1 of which a frame was handed to a worker (or, $2 = RUNNING, was begun), at $3 each; those that are further stay.
-- Nobody is waited for: a job that somebody else is at comes back without a topic, and may be marked later.
WITH free AS MATERIALIZED (
  SELECT j.pk_job FROM rota.job j WHERE j.pk_job = ANY ($1::uuid[]) FOR NO KEY UPDATE SKIP LOCKED
), marked AS (
  UPDATE rota.job j SET
    state = $2::text, ts_updated = now(), reason = NULL, ts_wait_until = NULL,
    history = j.history || CASE WHEN $2 = 'RUNNING' AND j.state = 'SCHEDULED'
                                THEN jsonb_build_array(jsonb_build_array('DISPATCHED', m.at_ms, NULL)) ELSE '[]' END
                        || jsonb_build_array(jsonb_build_array($2::text, m.at_ms, NULL))
  FROM unnest($1::uuid[], $3::bigint[]) AS m (pk_job, at_ms) JOIN free USING (pk_job)
  WHERE j.pk_job = m.pk_job AND (j.state = 'SCHEDULED' OR $2 = 'RUNNING' AND j.state = 'DISPATCHED')
  RETURNING j.pk_job, j.pk_show, j.topic, (extract(epoch FROM j.ts_submitted) * 1000)::bigint AS submitted_ms
)
SELECT pk_job, pk_show, topic, submitted_ms FROM marked
UNION ALL
SELECT j.pk_job, NULL, NULL, NULL FROM rota.job j
WHERE j.pk_job = ANY ($1::uuid[]) AND NOT EXISTS (SELECT FROM free WHERE free.pk_job = j.pk_job)
