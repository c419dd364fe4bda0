-- Record what undoes the jobs $3 of the sagas $1, $2; how many are new.
SELECT rota.saga_record($1::uuid[], $2::text[], $3::uuid[], $4::text[], $5::bytea[], $6::text[])
