-- Count $2 frames each at layers $1 as ended in way $3, having taken $4 ms; the jobs of layers that have none left.
SELECT rota.layers_count($1::uuid[], $2::integer[], $3::text, $4::bigint)
