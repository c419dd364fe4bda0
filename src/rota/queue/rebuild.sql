-- Count everything anew from the rows, and set the counter mode and stripes unless null.
SELECT rota.queue_rebuild_counts($1::text, $2::int)
