-- Shows that may run only so many jobs at once.
SELECT pk_show FROM rota.show WHERE int_max_jobs >= 0
