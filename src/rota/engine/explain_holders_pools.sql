-- Which shows use most of the pools $1, at most $2.
SELECT u.id, coalesce(s.str_name, u.id::text) AS name, u.frames, u.cores, u.gpus
FROM (
  SELECT p.pk_show AS id, count(*) AS frames, sum(p.int_cores_reserved)::bigint AS cores,
         sum(p.int_gpus_reserved)::bigint AS gpus
  FROM rota.proc p WHERE p.pk_alloc = ANY ($1::uuid[]) GROUP BY 1 ORDER BY 3 DESC, 4 DESC, 1 LIMIT $2::integer
) AS u
LEFT JOIN rota.show s ON s.pk_show = u.id
ORDER BY u.cores DESC, u.gpus DESC, u.id
