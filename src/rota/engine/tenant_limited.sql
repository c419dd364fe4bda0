-- Shows that may run only so many jobs at once, by a limit of their own or of a policy that some of their jobs came in by.
SELECT pk_show FROM rota.show WHERE int_max_jobs >= 0
UNION SELECT pk_show FROM rota.job WHERE reason = 'tenant_limit'
UNION SELECT s.pk_show FROM rota.job_slot s
JOIN rota.job j ON j.pk_job = s.pk_job JOIN rota.policy_word w ON w.word = j.word AND w.jobs_max IS NOT NULL
