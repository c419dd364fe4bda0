-- Show $1 as it is now.
SELECT pk_show AS id, str_name AS name, b_scheduler_managed AS managed, int_fence AS fence, int_version AS version,
       int_max_jobs AS max_jobs
FROM rota.show WHERE pk_show = $1::uuid
