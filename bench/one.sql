-- The smallest useful query: one parameter, one row.
SELECT $1::int + 1
