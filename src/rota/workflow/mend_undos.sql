-- Write the news of up to $1 compensations again that are over, or gone, unheard; one that was never submitted is due again.
WITH lost AS (
  SELECT s.pk_show, s.workflow_id, e.pk_saga, e.number, e.pk_undo
  FROM rota.saga s JOIN rota.saga_entry e USING (pk_saga)
  WHERE s.state = 'rolling_back' AND e.state = 'running'
    AND NOT EXISTS (SELECT FROM rota.job j WHERE j.pk_job = e.pk_undo)
    AND NOT EXISTS (SELECT FROM rota.workflow_news n WHERE n.pk_job = e.pk_undo)
  ORDER BY s.pk_saga LIMIT $1::int FOR NO KEY UPDATE OF s SKIP LOCKED
), again AS (
  UPDATE rota.saga_entry e SET state = 'pending', ts_changed = clock_timestamp()
  FROM lost l WHERE e.pk_saga = l.pk_saga AND e.number = l.number AND l.pk_undo IS NULL
), told AS (
  INSERT INTO rota.workflow_news (kind, workflow_id, pk_show, pk_job, state, reason, pk_layer, frames, request, ts_at)
  SELECT 'undo', l.workflow_id, l.pk_show, l.pk_undo, coalesce(d.state, 'FAILED'),
         CASE WHEN d.pk_job IS NULL THEN 'Its job is gone, and nothing is known of its end.' ELSE d.reason END,
         d.layers[1].pk_layer, coalesce(d.layers[1].frames, 1), d.request, coalesce(d.ts_finished, clock_timestamp())
  FROM lost l LEFT JOIN LATERAL (SELECT * FROM rota.job_done d WHERE d.pk_job = l.pk_undo LIMIT 1) AS d ON true
  WHERE l.pk_undo IS NOT NULL
)
SELECT pk_show, workflow_id, pk_undo FROM lost
