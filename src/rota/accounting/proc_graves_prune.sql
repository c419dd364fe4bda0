-- Remove at most $1 graves whose show has a higher fence by now, which does their work, or is gone.
DELETE FROM rota.proc_grave
WHERE (pk_show, token_last) IN (
  SELECT g.pk_show, g.token_last
  FROM rota.proc_grave g LEFT JOIN rota.show s ON s.pk_show = g.pk_show
  WHERE s.pk_show IS NULL OR s.int_fence > g.int_fence
  LIMIT $1
)
