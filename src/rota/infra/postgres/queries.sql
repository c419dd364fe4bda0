-- name: invalid_indexes
-- Indexes left invalid by an interrupted CREATE INDEX CONCURRENTLY; PostgreSQL never uses them.
SELECT indexrelid::regclass::text AS name
FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid
WHERE NOT indisvalid AND relnamespace = 'rota'::regnamespace
ORDER BY name

-- name: migration_record
-- Record an applied migration, in the same transaction as the migration itself.
INSERT INTO rota.migration (number, phase, name, checksum) VALUES ($1, $2, $3, $4)

-- name: migration_table_exists
-- Whether this database was ever migrated.
SELECT to_regclass('rota.migration') IS NOT NULL

-- name: migration_try_lock
-- Try to become the only migrator of this database; the lock is held until the session ends.
SELECT pg_try_advisory_lock($1)

-- name: migrations_applied
-- All applied migrations, by number.
SELECT number, phase, name, checksum, applied_at FROM rota.migration ORDER BY number

-- name: functions_applied
-- Every function file that was applied.
SELECT name, checksum, revision, applied_at FROM rota.migration_function ORDER BY name

-- name: function_record
-- Record that a function file was applied, in the same transaction as its statements.
INSERT INTO rota.migration_function (name, checksum, revision) VALUES ($1, $2, $3)
ON CONFLICT (name) DO UPDATE SET checksum = excluded.checksum, revision = excluded.revision, applied_at = clock_timestamp()
