-- Forget up to $2 outputs that were decided about before $1 and whose jobs are not kept any more.
DELETE FROM rota.output o USING (
  SELECT i.token FROM rota.output i
  WHERE i.ts_decided < $1::timestamptz AND NOT EXISTS (SELECT FROM rota.job j WHERE j.pk_job = i.pk_job)
    AND NOT EXISTS (SELECT FROM rota.job_done d WHERE d.pk_job = i.pk_job)
  ORDER BY i.ts_decided LIMIT $2::integer FOR UPDATE SKIP LOCKED
) AS old WHERE o.token = old.token
