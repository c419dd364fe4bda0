-- Workers that neither said goodbye nor were lost.
SELECT pk_host, str_name, pool, extract(epoch FROM clock_timestamp() - ts_up)::float8 AS age_s FROM rota.worker WHERE state = 'up'
