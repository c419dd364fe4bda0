-- How many sagas roll back.
SELECT count(*) FROM rota.saga WHERE state = 'rolling_back'
