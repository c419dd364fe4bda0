-- PENDING to SCHEDULED, with the queue entries; a row for each job that this call admitted.
SELECT admitted AS id FROM rota.job_admit($1::uuid[]) AS admitted
