-- Forget the caps of $1 jobs that have ended; how many of each show.
SELECT pk_show, jobs FROM rota.caps_forget($1::integer)
