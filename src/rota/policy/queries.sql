-- name: approvals_decide
-- Move approval $1 from pending to $2.
UPDATE rota.approval SET state = $2::text, ts_decided = clock_timestamp()
WHERE pk_approval = $1::uuid AND (state = 'pending' OR $2 = 'stale')

-- name: approvals_depth
-- The number of pending approvals by kind.
SELECT k.kind, (SELECT count(*) FROM rota.approval a WHERE a.state = 'pending' AND a.kind = k.kind) AS pending
FROM unnest(ARRAY['job', 'step']) AS k (kind)

-- name: approvals_due
-- Pending approvals past their expiry, oldest first; at most $1.
SELECT pk_approval FROM rota.approval WHERE state = 'pending' AND ts_expires <= clock_timestamp()
ORDER BY ts_expires LIMIT $1::integer

-- name: approvals_forget
-- Delete approvals decided before $1, at most $2.
DELETE FROM rota.approval WHERE pk_approval IN (
  SELECT a.pk_approval FROM rota.approval a
  WHERE a.state <> 'pending' AND a.ts_decided < $1::timestamptz LIMIT $2::integer)

-- name: approvals_latest
-- The last approval of each of the subjects $2 of kind $1.
SELECT DISTINCT ON (subject) pk_approval FROM rota.approval WHERE kind = $1::text AND subject = ANY ($2::text[])
ORDER BY subject, ts_requested DESC

-- name: approvals_list
-- Approvals in state $1, of kind $2 and of shows $3 (NULL: any), after approval $4, oldest first; at most $5.
SELECT a.pk_approval FROM rota.approval a
WHERE ($1::text IS NULL OR a.state = $1) AND ($2::text IS NULL OR a.kind = $2)
  AND ($3::uuid[] IS NULL OR a.pk_show = ANY ($3))
  AND ($4::uuid IS NULL OR (a.ts_requested, a.pk_approval) > (SELECT b.ts_requested, b.pk_approval FROM rota.approval b
                                                              WHERE b.pk_approval = $4))
ORDER BY a.ts_requested, a.pk_approval LIMIT $5::integer

-- name: approvals_lock
-- Lock approval $1 until the transaction ends.
SELECT pk_approval FROM rota.approval WHERE pk_approval = $1::uuid FOR UPDATE

-- name: approvals_read
-- Approvals by id, with their votes.
SELECT a.pk_approval AS id, a.kind, a.subject, coalesce(s.str_name, a.pk_show::text) AS show, a.pk_show AS show_id, a.state,
       a.hash, a.title, a.reason, a.rule, a.snapshot, a.quorum, a.approvers, a.principal, a.actor,
       a.ts_requested AS requested_at, a.ts_expires AS expires_at, a.ts_decided AS decided_at,
       a.state = 'pending' AND coalesce(a.ts_expires <= clock_timestamp(), false) AS is_overdue,
       (SELECT coalesce(jsonb_agg(jsonb_build_object(
                 'voter', v.voter, 'agrees', v.agrees, 'reason', v.reason, 'at', v.ts_voted,
                 'may_be_named', coalesce(p.b_global, true)) ORDER BY v.ts_voted), '[]')
        FROM rota.approval_vote v LEFT JOIN rota.principal p ON p.name = v.voter WHERE v.pk_approval = a.pk_approval)::text AS votes
FROM rota.approval a LEFT JOIN rota.show s USING (pk_show) WHERE a.pk_approval = ANY ($1::uuid[])

-- name: approvals_request
-- Request approvals, except for subjects with a pending one. The hash of a subject is that of its first approval.
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

-- name: approvals_vote
-- Record a vote on approval $1 by voter $2: agrees $3, reason $4. An existing vote stays.
INSERT INTO rota.approval_vote (pk_approval, voter, agrees, reason) VALUES ($1::uuid, $2::text, $3::boolean, $4::text)
ON CONFLICT DO NOTHING

-- name: words_keep
-- Store decisions by their digests $1; existing rows stay. $3: the number of concurrent jobs of a show that each allows.
INSERT INTO rota.policy_word (digest, told, jobs_max)
SELECT given.digest, given.told, given.jobs_max
FROM unnest($1::bytea[], $2::bytea[], $3::integer[]) AS given (digest, told, jobs_max)
WHERE NOT EXISTS (SELECT FROM rota.policy_word w WHERE w.digest = given.digest)
ORDER BY given.digest
ON CONFLICT DO NOTHING

-- name: words_read
-- The decisions with the numbers $1.
SELECT word, told FROM rota.policy_word WHERE word = ANY ($1::integer[])

-- name: guard_set
-- Set whether servers evaluate a policy before jobs run.
UPDATE rota.policy_guard SET asks = $1::boolean WHERE asks <> $1::boolean

-- name: guard_get
-- Whether servers evaluate a policy before jobs run.
SELECT asks FROM rota.policy_guard

-- name: nudge
-- Notify every server to reload its policy file.
SELECT pg_notify($1, 'look')
