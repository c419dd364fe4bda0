-- What time it is by the clock of PostgreSQL.
SELECT clock_timestamp() AS now
