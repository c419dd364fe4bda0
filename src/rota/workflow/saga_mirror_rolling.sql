-- Up to $1 sagas that roll back.
SELECT pk_show, workflow_id FROM rota.saga WHERE state = 'rolling_back' ORDER BY pk_saga LIMIT $1::int
