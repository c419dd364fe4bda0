-- Have jobs $1 wait for jobs $2, each with what becomes of it, $3, when that does not succeed.
SELECT rota.jobs_wait($1::uuid[], $2::uuid[], $3::text[])
