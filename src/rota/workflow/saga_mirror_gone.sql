-- Which of the sagas $2 of shows $1, by name, are over; no show: a run.
SELECT g.at::int AS at
FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS g (show, name, at)
WHERE NOT EXISTS (
  SELECT FROM rota.saga s
  WHERE s.workflow_id = g.name AND s.state IN ('open', 'rolling_back') AND s.pk_show = CASE WHEN g.show = ''
    THEN (SELECT r.pk_show FROM rota.workflow_run r WHERE r.pk_run = CASE WHEN rota.is_uuid(g.name) THEN g.name::uuid END)
    ELSE (SELECT w.pk_show FROM rota.show w WHERE w.str_name = g.show) END)
