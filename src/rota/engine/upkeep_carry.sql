-- Carry up to $2 ends of frames out of day $1 whose jobs are kept for longer.
SELECT rota.frame_ends_carry($1::date, $2::integer)
