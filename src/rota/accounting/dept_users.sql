-- Shows with a point of department $1.
SELECT s.str_name AS name FROM rota.point p JOIN rota.show s USING (pk_show) WHERE p.pk_dept = $1::uuid ORDER BY 1
