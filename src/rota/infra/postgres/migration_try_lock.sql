-- Become the one migrator of this database, if there is none; held until the session ends.
SELECT pg_try_advisory_lock($1)
