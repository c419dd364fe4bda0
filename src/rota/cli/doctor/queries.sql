-- name: doctor
-- State of PostgreSQL, the holder of lease $1, and jobs that have been in a transient state for $2 seconds or longer.
-- Job and proc counts stop at 1000.
SELECT current_setting('server_version') AS version, current_setting('server_version_num')::integer AS number,
       extract(epoch FROM clock_timestamp())::float8 AS now_s,
       current_setting('max_connections')::integer - current_setting('superuser_reserved_connections')::integer AS most,
       (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend') AS connected,
       pg_database_size(current_database()) AS bytes,
       (SELECT holder FROM rota.lease WHERE name = $1::text AND expires_at > clock_timestamp()) AS leader,
       (SELECT count(*) FROM rota.lease WHERE name LIKE 'dispatcher:%' AND expires_at > clock_timestamp()) AS dispatchers,
       (SELECT count(*) FROM (SELECT FROM rota.job WHERE ends_as IS NOT NULL
          AND ts_updated < clock_timestamp() - make_interval(secs => $2::float8) LIMIT 1000) AS late) AS ending,
       (SELECT count(*) FROM (SELECT FROM rota.job WHERE state = 'PENDING' AND reason <> 'waiting_on_job'
          AND ts_updated < clock_timestamp() - make_interval(secs => $2) LIMIT 1000) AS late) AS pending,
       (SELECT count(*) FROM (SELECT FROM rota.proc p LEFT JOIN rota.worker w USING (pk_host)
          WHERE w.state IS DISTINCT FROM 'up' LIMIT 1000) AS late) AS orphans,
       (SELECT count(*) FROM rota.worker WHERE state = 'up') AS workers,
       (SELECT count(*) FROM rota.worker WHERE state = 'lost' AND ts_ended > clock_timestamp() - interval '1 hour') AS lost
