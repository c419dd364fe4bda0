-- Indexes that CREATE INDEX CONCURRENTLY began and did not finish; PostgreSQL never uses them.
SELECT indexrelid::regclass::text AS name
FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid
WHERE NOT indisvalid AND relnamespace = 'rota'::regnamespace
ORDER BY name
