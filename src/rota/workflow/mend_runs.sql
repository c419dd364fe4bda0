-- Up to $2 runs after run $1 that have not ended, with their timers, and whether a saga that they wait for is gone or over.
SELECT r.pk_run, r.pk_show, r.pk_workflow, r.state, r.steps, r.fence, t.places, t.attempts,
       r.state = 'COMPENSATING'
         AND NOT EXISTS (SELECT FROM rota.saga s WHERE s.pk_show = r.pk_show AND s.workflow_id = r.pk_run::text
                         AND s.state = 'rolling_back')
         AND NOT EXISTS (SELECT FROM rota.workflow_news n WHERE n.kind = 'saga' AND n.workflow_id = r.pk_run::text)
         AS is_undone
FROM rota.workflow_run r LEFT JOIN LATERAL (
  SELECT array_agg(t.place) AS places, array_agg(t.attempt) AS attempts
  FROM rota.workflow_timer t WHERE t.pk_run = r.pk_run
) AS t ON true
WHERE r.ts_ended IS NULL AND r.pk_run > $1::uuid ORDER BY r.pk_run LIMIT $2::int
