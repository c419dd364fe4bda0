-- What holds job $1 besides its frames, and which server leads, by the lease $2.
SELECT j.pk_show, j.pk_folder, j.pk_dept, j.ends_as, j.dispatch_failures, j.ts_ask_at, m.jobs_max,
       CASE WHEN m.jobs_max IS NOT NULL AND j.state = 'SCHEDULED'
                 AND NOT EXISTS (SELECT FROM rota.job_slot t WHERE t.pk_job = j.pk_job)
            THEN rota.job_slots_used(j.pk_show) END AS jobs_before,
       coalesce((SELECT sum(n) FROM rota.queue_returned WHERE parked_job = j.pk_job), 0)::bigint AS parked,
       (SELECT l.holder FROM rota.lease l WHERE l.name = $2::text AND l.expires_at > clock_timestamp()) AS leader,
       clock_timestamp() AS now
FROM rota.job j JOIN rota.show s USING (pk_show) LEFT JOIN rota.policy_word w USING (word)
CROSS JOIN LATERAL (SELECT least(nullif(s.int_max_jobs, -1), w.jobs_max) AS jobs_max) AS m
WHERE j.pk_job = $1::uuid
