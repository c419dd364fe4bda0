-- name: events_audit
-- The audit trail after entry $1, at most $2 entries, with the show, job or run that each concerns.
SELECT seq, (extract(epoch FROM at) * 1000)::bigint AS at_ms, action, target, detail ->> 'show' AS show,
       CASE WHEN action LIKE 'approval.%' THEN detail ->> 'job' END AS job,
       CASE WHEN action LIKE 'workflow.%' AND target LIKE 'run:%' THEN substr(target, 5) END AS run
FROM rota.audit WHERE seq > $1::bigint ORDER BY seq LIMIT $2::int

-- name: events_audit_last
-- The last entry of the audit trail.
SELECT seq FROM rota.audit_head

-- name: events_history
-- Histories of jobs $1, live or done; a job that ends meanwhile is found once.
SELECT pk_job, rota.job_history_shown(history, state, ts_submitted, NULL) AS history FROM rota.job WHERE pk_job = ANY ($1::uuid[])
UNION ALL
SELECT pk_job, rota.job_history_shown(history, state, ts_submitted, ts_finished) FROM rota.job_done WHERE pk_job = ANY ($1::uuid[])

-- name: events_shows
-- Every show with its name.
SELECT pk_show, str_name FROM rota.show
