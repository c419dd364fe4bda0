-- Shows with a subscription to pool $1.
SELECT s.str_name AS name FROM rota.subscription b JOIN rota.show s USING (pk_show)
WHERE b.pk_alloc = $1::uuid ORDER BY 1
