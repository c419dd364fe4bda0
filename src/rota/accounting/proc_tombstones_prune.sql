-- Forget at most $1 tombstones whose show has a higher fence by now, which refuses the late insert just as well.
DELETE FROM rota.proc_tombstone
WHERE token IN (
  SELECT t.token FROM rota.proc_tombstone t
  JOIN rota.show s ON s.pk_show = t.pk_show AND s.int_fence > t.int_fence
  LIMIT $1
)
