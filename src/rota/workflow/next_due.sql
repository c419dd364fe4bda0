-- In how many milliseconds the next timer is due.
SELECT ceil(extract(epoch FROM ts_due - clock_timestamp()) * 1000)::bigint AS in_ms FROM rota.workflow_timer
ORDER BY ts_due LIMIT 1
