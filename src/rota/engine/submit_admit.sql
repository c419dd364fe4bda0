-- Jobs $1 from PENDING to SCHEDULED with the queue entries, by the words $2, unless it is past $3; a row for each admitted.
SELECT admitted AS id FROM rota.job_admit($1::uuid[], $2::bytea[], $3::timestamptz) AS admitted
