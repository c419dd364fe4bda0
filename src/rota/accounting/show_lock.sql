-- Hold the lock of show $1 exclusive until the transaction ends; no row if the show is gone.
SELECT pk_show AS id, str_name AS name, b_scheduler_managed AS managed, int_fence AS fence, int_version AS version,
       int_max_jobs AS max_jobs
FROM rota.show_exclusive($1::uuid) WHERE pk_show IS NOT NULL
