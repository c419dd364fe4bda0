-- Shows whose books Redis keeps, with their fences.
SELECT pk_show, int_fence FROM rota.show WHERE b_scheduler_managed ORDER BY pk_show
