-- Where frames of job $1 are, those booked first first; at most $2 rows.
SELECT p.pk_layer AS layer, coalesce(w.str_name, p.pk_host::text) AS worker, p.frames, p.since
FROM (SELECT pk_layer, pk_host, count(*) AS frames, min(ts_booked) AS since
      FROM rota.proc WHERE pk_job = $1::uuid GROUP BY 1, 2 ORDER BY 4 LIMIT $2::integer) AS p
LEFT JOIN rota.worker w USING (pk_host) ORDER BY p.since
