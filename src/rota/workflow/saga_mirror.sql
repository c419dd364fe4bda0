-- The sagas $2 of shows $1, each with up to $3 of its entries that are left, the next one first; no fence: it is over.
SELECT g.workflow_id, w.str_name AS show, s.fence, s.state, e.steps, e.jobs, e.states, e.templates,
       EXISTS (SELECT FROM rota.workflow_run r WHERE r.pk_show = g.pk_show
               AND r.pk_run = CASE WHEN rota.is_uuid(g.workflow_id) THEN g.workflow_id::uuid END) AS is_run
FROM unnest($1::uuid[], $2::text[]) AS g (pk_show, workflow_id)
JOIN rota.show w USING (pk_show)
LEFT JOIN rota.saga s ON s.pk_show = g.pk_show AND s.workflow_id = g.workflow_id AND s.state IN ('open', 'rolling_back')
LEFT JOIN LATERAL (
  SELECT array_agg(e.step) AS steps, array_agg(e.pk_job) AS jobs, array_agg(e.state) AS states,
         array_agg(e.template) AS templates
  FROM (SELECT * FROM rota.saga_entry e WHERE e.pk_saga = s.pk_saga AND e.state IN ('pending', 'running')
        ORDER BY e.state = 'running' DESC, e.number DESC LIMIT $3::int) AS e
) AS e ON true
