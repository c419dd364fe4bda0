-- Close the pending approvals of subjects that have ended. Locks in id order, so that callers cannot deadlock.
CREATE OR REPLACE FUNCTION rota.approvals_close(of_kind text, subjects text[]) RETURNS void
LANGUAGE sql AS $$
  UPDATE rota.approval a SET state = 'closed', ts_decided = clock_timestamp()
  FROM (SELECT o.pk_approval FROM rota.approval o
        WHERE o.kind = of_kind AND o.subject = ANY (subjects) AND o.state = 'pending'
        ORDER BY o.pk_approval FOR UPDATE) AS open
  WHERE a.pk_approval = open.pk_approval
$$;
