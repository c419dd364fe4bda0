-- The audit trail after entry $1, $2 entries at most, with the show that each concerns; and the job or run.
SELECT seq, (extract(epoch FROM at) * 1000)::bigint AS at_ms, action, target, detail ->> 'show' AS show,
       CASE WHEN action LIKE 'approval.%' THEN detail ->> 'job' END AS job,
       CASE WHEN action LIKE 'workflow.%' AND target LIKE 'run:%' THEN substr(target, 5) END AS run
FROM rota.audit WHERE seq > $1::bigint ORDER BY seq LIMIT $2::int
