-- Forget up to $2 workers that ended before $1 and have nothing booked.
DELETE FROM rota.worker w USING (
  SELECT o.pk_host FROM rota.worker o
  WHERE o.state <> 'up' AND o.ts_ended < $1::timestamptz
    AND NOT EXISTS (SELECT FROM rota.proc p WHERE p.pk_host = o.pk_host)
  ORDER BY o.ts_ended LIMIT $2::integer FOR UPDATE SKIP LOCKED
) AS old WHERE w.pk_host = old.pk_host
