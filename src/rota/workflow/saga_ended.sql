-- How the sagas $1 have ended.
SELECT pk_saga, state FROM rota.saga WHERE pk_saga = ANY ($1::bigint[])
