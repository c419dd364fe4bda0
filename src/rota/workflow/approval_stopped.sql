-- Whether run $1 was told to stop, and has not heard of it yet.
SELECT EXISTS (SELECT FROM rota.workflow_news WHERE kind = 'cancel' AND workflow_id = $1::text)
