-- Worker $1 is gone or lost ($2), unless somebody said so before.
UPDATE rota.worker SET state = $2::text, ts_ended = clock_timestamp() WHERE pk_host = $1::uuid AND state = 'up'
