-- Jobs that wait for room of their own, or of their show, and for about how many frames there is some by now.
SELECT w.pk_job, w.room FROM (
  SELECT j.pk_job, j.pk_show, least(nullif(s.int_max_jobs, -1), word.jobs_max) AS jobs_max, slot.pk_job IS NOT NULL AS let_in,
         row_number() OVER (PARTITION BY j.pk_show, slot.pk_job IS NULL ORDER BY j.priority DESC, j.pk_job) AS turn,
         CASE
           WHEN r.pk_job IS NULL THEN p.n
           WHEN used.frames IS NULL THEN p.n
           WHEN r.int_max_cores > 0 AND used.cores > 0 THEN (r.int_max_cores - used.cores) / (used.cores / used.frames)
           WHEN r.int_max_gpus > 0 AND used.gpus > 0 THEN (r.int_max_gpus - used.gpus) / (used.gpus / used.frames)
           ELSE 1 END AS room
  FROM (SELECT parked_job AS job, sum(n)::bigint AS n FROM rota.queue_returned WHERE parked_job IS NOT NULL
        GROUP BY 1) AS p
  JOIN rota.job j ON j.pk_job = p.job AND j.ends_as IS NULL
  LEFT JOIN rota.show s ON s.pk_show = j.pk_show
  LEFT JOIN rota.policy_word word ON word.word = j.word
  LEFT JOIN rota.job_slot slot ON slot.pk_job = j.pk_job
  LEFT JOIN rota.job_resource r ON r.pk_job = p.job
  LEFT JOIN (SELECT pk_job, count(*) AS frames, sum(int_cores_reserved)::bigint AS cores,
                    sum(int_gpus_reserved)::bigint AS gpus
             FROM rota.proc WHERE pk_job IN (SELECT parked_job FROM rota.queue_returned WHERE parked_job IS NOT NULL)
             GROUP BY 1) AS used ON used.pk_job = p.job
) AS w
WHERE w.jobs_max IS NULL OR w.let_in
  OR w.turn <= w.jobs_max - (SELECT rota.job_slots_used(w.pk_show))
LIMIT 500
