-- Jobs that wait for room of their own, and for about how many frames there is some by now.
SELECT p.job AS pk_job, CASE
         WHEN r.pk_job IS NULL THEN p.n
         WHEN used.frames IS NULL THEN p.n
         WHEN r.int_max_cores > 0 AND used.cores > 0 THEN (r.int_max_cores - used.cores) / (used.cores / used.frames)
         WHEN r.int_max_gpus > 0 AND used.gpus > 0 THEN (r.int_max_gpus - used.gpus) / (used.gpus / used.frames)
         ELSE 1 END AS room
FROM (SELECT parked_job AS job, sum(n)::bigint AS n FROM rota.queue_returned WHERE parked_job IS NOT NULL
      GROUP BY 1 LIMIT 500) AS p
JOIN rota.job j ON j.pk_job = p.job AND j.ends_as IS NULL
LEFT JOIN rota.job_resource r ON r.pk_job = p.job
LEFT JOIN (SELECT pk_job, count(*) AS frames, sum(int_cores_reserved)::bigint AS cores, sum(int_gpus_reserved)::bigint AS gpus
           FROM rota.proc WHERE pk_job IN (SELECT parked_job FROM rota.queue_returned WHERE parked_job IS NOT NULL)
           GROUP BY 1) AS used ON used.pk_job = p.job
