-- Drop day $2 of table $1.
SELECT rota.day_drop($1::text, $2::date)
