-- Up to $2 sagas after number $1 that are not over.
SELECT pk_saga, pk_show, workflow_id FROM rota.saga WHERE state IN ('open', 'rolling_back') AND pk_saga > $1::bigint
ORDER BY pk_saga LIMIT $2::int
