-- Have the runs $1 hear that they are to end.
INSERT INTO rota.workflow_news (kind, workflow_id, pk_show, reason)
SELECT 'cancel', r.pk_run::text, r.pk_show, 'The run that it belongs to has stopped it.'
FROM rota.workflow_run r WHERE r.pk_run = ANY ($1::uuid[]) AND r.ts_ended IS NULL
