-- How many graves of its present fence each show has; shows without any are left out.
SELECT g.pk_show, count(*) AS graves
FROM rota.proc_grave g JOIN rota.show s ON s.pk_show = g.pk_show AND s.int_fence = g.int_fence
GROUP BY g.pk_show
