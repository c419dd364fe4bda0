-- What each show may count on in each pool, and what it uses there.
SELECT s.pk_show, s.pk_alloc, s.int_size AS size, coalesce(p.cores, 0)::bigint AS used
FROM rota.subscription s
LEFT JOIN (SELECT pk_show, pk_alloc, sum(int_cores_reserved) AS cores FROM rota.proc GROUP BY 1, 2) AS p
  ON p.pk_show = s.pk_show AND p.pk_alloc = s.pk_alloc
