-- A partition of table $1 for day $2, or for a part of it; at most $3 rows of the default move there.
SELECT rota.day_make($1::text, $2::date, $3::integer)
