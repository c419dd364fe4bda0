-- Ask for approvals; one is left out whose subject waits already. The hash of a subject is that of its first approval.
INSERT INTO rota.approval (pk_approval, kind, subject, pk_show, hash, title, reason, rule, snapshot, quorum, approvers,
                           principal, actor, ts_expires)
SELECT g.id, g.kind, g.subject, g.show,
       coalesce((SELECT a.hash FROM rota.approval a WHERE a.kind = g.kind AND a.subject = g.subject
                 ORDER BY a.ts_requested LIMIT 1), g.hash),
       g.title, g.reason, g.rule, g.snapshot, g.quorum, ARRAY(SELECT jsonb_array_elements_text(g.approvers)), g.principal,
       g.actor, CASE WHEN g.expires_s > 0 THEN clock_timestamp() + make_interval(secs => g.expires_s) END
FROM unnest($1::uuid[], $2::text[], $3::text[], $4::uuid[], $5::bytea[], $6::text[], $7::text[], $8::text[], $9::text[],
            $10::integer[], $11::jsonb[], $12::text[], $13::text[], $14::float8[])
  AS g (id, kind, subject, show, hash, title, reason, rule, snapshot, quorum, approvers, principal, actor, expires_s)
ON CONFLICT (kind, subject) WHERE state = 'pending' DO NOTHING
RETURNING pk_approval
