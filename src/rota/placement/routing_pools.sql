-- Every pool of the books, with what is configured of it.
SELECT a.pk_alloc AS id, a.str_name AS name, coalesce(s.provides, '{}') AS provides,
       coalesce(s.status, 'active') AS status, coalesce(s.description, '') AS description,
       (extract(epoch FROM s.ts_drain_started) * 1000)::bigint AS drain_started_ms,
       coalesce(s.drain_timeout_s, 300) AS drain_timeout_s
FROM rota.alloc a LEFT JOIN rota.pool_spec s USING (pk_alloc) ORDER BY a.str_name
