-- Forget up to $2 idempotency keys from before $1 whose jobs are not live.
DELETE FROM rota.idempotency_key k USING (
  SELECT i.pk_show, i.key FROM rota.idempotency_key i
  WHERE i.ts_created < $1::timestamptz AND NOT EXISTS (SELECT FROM rota.job j WHERE j.pk_job = i.pk_job)
  ORDER BY i.ts_created LIMIT $2::integer FOR UPDATE SKIP LOCKED
) AS old WHERE k.pk_show = old.pk_show AND k.key = old.key
