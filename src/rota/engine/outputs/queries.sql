-- name: outputs_allow
-- Append checks $5 to frame ends, and release those that were held; each by layer, frame, token and day.
UPDATE rota.frame_end e SET output = nullif(e.output, 'held'), checks = coalesce(e.checks, '[]') || g.said
FROM unnest($1::uuid[], $2::integer[], $3::bigint[], $4::timestamptz[], $5::jsonb[]) AS g (layer, frame, token, ended, said)
WHERE e.pk_layer = g.layer AND e.frame = g.frame AND e.token = g.token AND e.ts_finished >= g.ended

-- name: outputs_claim
-- Claim at most $1 due scans for $2 seconds, with the outputs to scan.
WITH due AS (
  SELECT s.token FROM rota.scan s WHERE s.ts_due <= now() ORDER BY s.ts_due LIMIT $1::integer FOR UPDATE SKIP LOCKED
), claimed AS (
  UPDATE rota.scan s SET ts_due = clock_timestamp() + make_interval(secs => $2::float8), tries = s.tries + 1,
    unsettled = s.unsettled + 1
  FROM due WHERE s.token = due.token RETURNING s.*
)
SELECT c.token, c.pk_layer, c.frame, c.pk_job, c.pk_show, c.mode, c.budget_s, c.meta, c.tries, c.unsettled, c.ts_ended,
       extract(epoch FROM clock_timestamp() - c.ts_ended)::float8 AS age_s, e.state, e.value, e.value_at, e.artifacts
FROM claimed c
LEFT JOIN rota.frame_end e
  ON e.pk_layer = c.pk_layer AND e.frame = c.frame AND e.token = c.token AND e.ts_finished >= c.ts_ended
ORDER BY c.token

-- name: outputs_count
-- Move $3 frames of each of the layers $1, of jobs $2, from succeeded to quarantined; returns jobs whose state changed.
SELECT pk_job, pk_show, topic, state, workflow_id FROM rota.outputs_count($1::uuid[], $2::uuid[], $3::integer[], $4::text)

-- name: outputs_free
-- Release dependents of jobs $1, if these have ended and none of their outputs is held.
SELECT rota.jobs_release(ARRAY(SELECT b FROM unnest($1::uuid[]) AS b
                               WHERE NOT EXISTS (SELECT FROM rota.job j WHERE j.pk_job = b))) AS waiting
WHERE EXISTS (SELECT FROM rota.job_after a WHERE a.pk_before = ANY ($1))

-- name: outputs_later
-- Postpone scans $1, claimed under the numbers $2, by $3 seconds each.
UPDATE rota.scan s SET ts_due = clock_timestamp() + make_interval(secs => mine.pause_s), unsettled = 0
FROM unnest($1::bigint[], $2::integer[], $3::float8[]) AS mine (token, tries, pause_s)
WHERE s.token = mine.token AND s.tries = mine.tries

-- name: outputs_quarantine
-- Quarantine the outputs of frames that succeeded, with reasons ($5) and checks ($6); returns which.
UPDATE rota.frame_end e SET
  state = 'OUTPUT_QUARANTINED', output = 'quarantined', code = 'output_quarantined_async', error = g.why,
  checks = coalesce(e.checks, '[]') || g.said
FROM unnest($1::uuid[], $2::integer[], $3::bigint[], $4::timestamptz[], $5::text[], $6::jsonb[])
  AS g (layer, frame, token, ended, why, said)
WHERE e.pk_layer = g.layer AND e.frame = g.frame AND e.token = g.token AND e.ts_finished >= g.ended
  AND e.state = 'SUCCEEDED'
RETURNING e.token

-- name: outputs_redact
-- Replace the output of attempt $3 of frame $2 of layer $1 by value $5, or pointer $6, and files $7 (a line each).
UPDATE rota.frame_end e SET
  state = 'SUCCEEDED', output = 'redacted', value = $5::bytea, value_at = $6::text,
  artifacts = CASE WHEN $7::text <> '' THEN string_to_array($7, E'\n') END,
  code = NULL, error = NULL, checks = coalesce(e.checks, '[]') || $8::jsonb
WHERE e.pk_layer = $1::uuid AND e.frame = $2::integer AND e.token = $3::bigint AND e.ts_finished >= $4::timestamptz
  AND e.state IN ('SUCCEEDED', 'OUTPUT_QUARANTINED')

-- name: outputs_settle
-- Delete scans $1 under the claim numbers $2; returns those not claimed or settled by others since.
DELETE FROM rota.scan s USING unnest($1::bigint[], $2::integer[]) AS mine (token, tries)
WHERE s.token = mine.token AND s.tries = mine.tries RETURNING s.token

-- name: outputs_get
-- Output $1, held or decided, with the end of its frame.
SELECT o.token AS id, o.pk_job AS job, o.pk_show, coalesce(s.str_name, o.pk_show::text) AS show, o.state, o.severity, o.rule,
       o.reason, o.meta, o.at, o.original, o.pk_layer, o.frame, o.ts_ended, e.state AS frame_state, e.checks, e.value,
       e.value_at, e.artifacts
FROM (
  SELECT token, pk_job, pk_show, pk_layer, frame, state, severity, rule, reason, meta, original, ts_ended, ts_decided AS at
  FROM rota.output WHERE token = $1::bigint
  UNION ALL
  SELECT token, pk_job, pk_show, pk_layer, frame, 'held', NULL, '', '', meta, NULL, ts_ended, ts_ended FROM rota.scan
  WHERE token = $1 AND mode <> 'pass' AND NOT EXISTS (SELECT FROM rota.output o WHERE o.token = $1)
) AS o
LEFT JOIN rota.show s ON s.pk_show = o.pk_show
JOIN rota.frame_end e ON e.pk_layer = o.pk_layer AND e.frame = o.frame AND e.token = o.token AND e.ts_finished >= o.ts_ended

-- name: outputs_letter
-- The dead letter of an output, by its cause.
SELECT dlq_id AS id FROM rota.dlq_entries WHERE kind = 'output' AND cause = $1::text

-- name: outputs_list
-- Outputs that are held, quarantined, redacted or released, newest first: before $4, at most $5.
-- Of shows $1 (null: all), in state $2 (null: any), of job $3 (null: any).
SELECT o.token AS id, o.pk_job AS job, coalesce(s.str_name, o.pk_show::text) AS show, o.state, o.severity, o.rule, o.reason,
       o.meta, o.at
FROM (
  (SELECT token, pk_job, pk_show, state, severity, rule, reason, meta, ts_decided AS at FROM rota.output
   WHERE ($1::uuid[] IS NULL OR pk_show = ANY ($1)) AND ($2::text IS NULL OR state = $2)
     AND ($3::uuid IS NULL OR pk_job = $3) AND token < $4::bigint
   ORDER BY token DESC LIMIT $5::integer)
  UNION ALL
  (SELECT token, pk_job, pk_show, 'held', NULL, '', '', meta, ts_ended FROM rota.scan
   WHERE mode <> 'pass' AND ($1::uuid[] IS NULL OR pk_show = ANY ($1)) AND ($2::text IS NULL OR $2 = 'held')
     AND ($3::uuid IS NULL OR pk_job = $3) AND token < $4::bigint
   ORDER BY token DESC LIMIT $5::integer)
) AS o LEFT JOIN rota.show s ON s.pk_show = o.pk_show
ORDER BY o.token DESC LIMIT $5::integer

-- name: outputs_lock
-- Lock ends of frames, each by layer, frame, token and day; returns the tokens of those found.
SELECT e.token FROM rota.frame_end e
JOIN unnest($1::uuid[], $2::integer[], $3::bigint[], $4::timestamptz[]) AS g (layer, frame, token, ended)
  ON e.pk_layer = g.layer AND e.frame = g.frame AND e.token = g.token AND e.ts_finished >= g.ended
ORDER BY e.token FOR UPDATE OF e

-- name: outputs_read
-- The end of attempt $3 of frame $2 of layer $1.
SELECT e.state, e.output, e.value, e.value_at, e.artifacts FROM rota.frame_end e
WHERE e.pk_layer = $1::uuid AND e.frame = $2::integer AND e.token = $3::bigint AND e.ts_finished >= $4::timestamptz

-- name: outputs_release
-- Make the output of attempt $3 of frame $2 of layer $1 readable, as it is or, with $6, as it was: at $5, with files
-- $7.
UPDATE rota.frame_end e SET
  state = 'SUCCEEDED', output = NULL, code = NULL, error = NULL,
  value = CASE WHEN $6::boolean THEN NULL ELSE e.value END,
  value_at = CASE WHEN $6 THEN $5::text ELSE e.value_at END,
  artifacts = CASE WHEN NOT $6 THEN e.artifacts WHEN $7::text <> '' THEN string_to_array($7, E'\n') END,
  checks = coalesce(e.checks, '[]') || $8::jsonb
WHERE e.pk_layer = $1::uuid AND e.frame = $2::integer AND e.token = $3::bigint AND e.ts_finished >= $4::timestamptz
  AND e.output IS NOT NULL

-- name: outputs_stop
-- Delete the scan of output $1.
DELETE FROM rota.scan WHERE token = $1::bigint RETURNING mode

-- name: outputs_keep
-- Store outputs that are withheld or redacted; a known output enters its new state.
INSERT INTO rota.output AS o (token, pk_layer, frame, pk_job, pk_show, state, severity, rule, reason, meta, original, ts_ended)
SELECT g.token, g.layer, g.frame, g.job, g.show, g.state, g.severity, g.rule, g.reason, g.meta,
       CASE WHEN g.original <> '' THEN string_to_array(g.original, E'\n') END, coalesce(g.ended, now())
FROM unnest($1::bigint[], $2::uuid[], $3::integer[], $4::uuid[], $5::uuid[], $6::text[], $7::text[], $8::text[], $9::text[],
            $10::bytea[], $11::text[], $12::timestamptz[])
  AS g (token, layer, frame, job, show, state, severity, rule, reason, meta, original, ended)
ORDER BY g.token
ON CONFLICT (token) DO UPDATE SET
  state = excluded.state, severity = excluded.severity, rule = excluded.rule, reason = excluded.reason,
  original = coalesce(o.original, excluded.original), ts_decided = clock_timestamp()

-- name: outputs_layers
-- What the policy needs to know of layers $1 besides the outputs themselves.
SELECT l.pk_layer, l.str_name AS layer, l.first_frame, l.frame_step, j.topic, j.labels, j.request,
       coalesce(s.str_name, j.pk_show::text) AS show
FROM rota.layer l JOIN rota.job j ON j.pk_job = l.pk_job LEFT JOIN rota.show s ON s.pk_show = j.pk_show
WHERE l.pk_layer = ANY ($1::uuid[])

-- name: outputs_scan
-- Add scans by token, each with its frame, metadata for the policy, and the mode when there is no verdict.
INSERT INTO rota.scan (token, pk_layer, frame, pk_job, pk_show, mode, budget_s, meta)
SELECT * FROM unnest($1::bigint[], $2::uuid[], $3::integer[], $4::uuid[], $5::uuid[], $6::text[], $7::real[], $8::bytea[])
