-- Make the partition of the day $1, unless it is there or something of that day is kept already.
SELECT rota.blob_make_day($1::date)
