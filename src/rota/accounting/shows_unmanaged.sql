-- Shows whose books PostgreSQL keeps alone.
SELECT pk_show FROM rota.show WHERE NOT b_scheduler_managed ORDER BY pk_show
