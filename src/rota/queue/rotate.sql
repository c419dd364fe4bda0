-- Take a new slot when the one in use holds $1 bytes, or is $2 seconds old and holds anything.
SELECT rota.queue_rotate($1::bigint, make_interval(secs => $2::float8))
