-- Whether this database was ever migrated.
SELECT to_regclass('rota.migration') IS NOT NULL
