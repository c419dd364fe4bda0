-- What is booked for job $1, the first $2 of it.
SELECT p.token, p.pk_layer, p.pk_host AS worker_id, coalesce(w.str_name, p.pk_host::text) AS worker,
       p.ts_booked AS since
FROM rota.proc p LEFT JOIN rota.worker w USING (pk_host)
WHERE p.pk_job = $1::uuid ORDER BY p.token LIMIT $2::integer
