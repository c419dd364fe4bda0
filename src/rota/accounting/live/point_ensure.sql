-- Make the points of show $1 that are missing for the departments among $2.
INSERT INTO rota.point (pk_show, pk_dept)
SELECT s.pk_show, d.pk_dept FROM rota.show s CROSS JOIN rota.dept d
WHERE s.pk_show = $1::uuid AND d.pk_dept = ANY ($2::uuid[])
  AND NOT EXISTS (SELECT FROM rota.point p WHERE p.pk_show = s.pk_show AND p.pk_dept = d.pk_dept)
ORDER BY d.pk_dept ON CONFLICT DO NOTHING
