-- Tables beside the ring, with their size and their rows as PostgreSQL last estimated them.
SELECT t.name, pg_total_relation_size(s.relid) AS bytes, s.n_live_tup AS rows, s.n_dead_tup AS dead_rows
FROM unnest($1::text[]) WITH ORDINALITY AS t (name, place)
JOIN pg_stat_user_tables s ON s.schemaname = 'rota' AND s.relname = t.name
ORDER BY t.place
