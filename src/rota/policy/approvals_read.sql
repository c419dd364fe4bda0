-- Approvals by id, with their votes.
SELECT a.pk_approval AS id, a.kind, a.subject, coalesce(s.str_name, a.pk_show::text) AS show, a.pk_show AS show_id, a.state,
       a.hash, a.title, a.reason, a.rule, a.snapshot, a.quorum, a.approvers, a.principal, a.actor,
       a.ts_requested AS requested_at, a.ts_expires AS expires_at, a.ts_decided AS decided_at,
       a.state = 'pending' AND coalesce(a.ts_expires <= clock_timestamp(), false) AS is_overdue,
       (SELECT coalesce(jsonb_agg(jsonb_build_object(
                 'voter', v.voter, 'agrees', v.agrees, 'reason', v.reason, 'at', v.ts_voted) ORDER BY v.ts_voted), '[]')
        FROM rota.approval_vote v WHERE v.pk_approval = a.pk_approval)::text AS votes
FROM rota.approval a LEFT JOIN rota.show s USING (pk_show) WHERE a.pk_approval = ANY ($1::uuid[])
