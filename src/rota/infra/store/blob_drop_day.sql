-- Drop the partition of the day $1.
SELECT rota.blob_drop_day($1::date)
