-- name: called
-- Names of the shows $1.
SELECT pk_show, str_name FROM rota.show WHERE pk_show = ANY ($1::uuid[])

-- name: cancel
-- Add a cancel message to the inboxes of runs $1.
INSERT INTO rota.workflow_news (kind, workflow_id, pk_show, reason)
SELECT 'cancel', r.pk_run::text, r.pk_show, 'The run that it belongs to has stopped it.'
FROM rota.workflow_run r WHERE r.pk_run = ANY ($1::uuid[]) AND r.ts_ended IS NULL

-- name: mapped
-- Results of the frames of layers $1, in order; frames without a result have no row.
SELECT DISTINCT ON (pk_layer, frame) pk_layer, frame, state, CASE WHEN rota.output_readable(output) THEN value END AS value,
       CASE WHEN rota.output_readable(output) THEN value_at END AS value_at, code, error
FROM rota.frame_end
WHERE pk_layer = ANY ($1::uuid[]) AND state NOT IN ('RETRIED', 'RETURNED')
ORDER BY pk_layer, frame, attempt DESC, ts_finished DESC

-- name: outputs
-- Outputs of the runs $1.
SELECT pk_run, output FROM rota.workflow_run WHERE pk_run = ANY ($1::uuid[])

-- name: partly
-- Those of the jobs $1 of which some frames succeeded.
SELECT d.pk_job FROM rota.job_done d
WHERE d.pk_job = ANY ($1::uuid[]) AND EXISTS (SELECT FROM unnest(d.layers) AS l WHERE l.succeeded > 0)

-- name: start
-- Insert runs; a run whose key is taken is not inserted, and returned as not made.
WITH given AS (
  SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::bigint[], $4::bytea[], $5::bytea[], $6::text[], $7::uuid[], $8::uuid[],
                       $9::smallint[], $10::text[])
    WITH ORDINALITY AS g (pk_run, pk_show, pk_workflow, steps, input, key, pk_parent, pk_root, depth, actor, at)
), made AS (
  INSERT INTO rota.workflow_run (pk_run, pk_show, pk_workflow, state, steps, input, key, pk_parent, pk_root, depth, actor)
  SELECT g.pk_run, g.pk_show, g.pk_workflow, 'RUNNING', g.steps, g.input, g.key, g.pk_parent, g.pk_root, g.depth, g.actor
  FROM given g
  ON CONFLICT (pk_show, key) WHERE key IS NOT NULL DO NOTHING
  RETURNING pk_run
)
SELECT g.at::int AS at, m.pk_run IS NOT NULL AS made, rota.now_ms() AS now_ms
FROM given g LEFT JOIN made m USING (pk_run) ORDER BY g.at

-- name: take
-- Lock up to $1 runs with inbox messages from $2 on, or a due timer, and take all of these; skips locked runs.
SELECT * FROM rota.workflow_take($1::int, $2::bigint)

-- name: values
-- Results of the steps of runs $1.
SELECT pk_run, place, value FROM rota.workflow_value WHERE pk_run = ANY ($1::uuid[])

-- name: write
-- Write transitions of runs; fails if one of them was advanced since it was read.
SELECT rota.workflow_write(
  $1::uuid[], $2::bigint[], $3::text[], $4::bytea[], $5::bytea[], $6::text[], $7::boolean[], $8::jsonb[],
  $9::uuid[], $10::smallint[], $11::int[], $12::bigint[], $13::uuid[], $14::smallint[], $15::int[],
  $16::uuid[], $17::smallint[], $18::bytea[], $19::text[])

-- name: declare
-- Insert a new version of workflow $2 in show $1, unless the latest is identical.
WITH latest AS (
  SELECT w.pk_workflow, w.version, w.digest FROM rota.workflow w WHERE w.pk_show = $1::uuid AND w.name = $2::text
  ORDER BY w.version DESC LIMIT 1
), made AS (
  INSERT INTO rota.workflow (pk_show, name, version, digest, spec)
  SELECT $1::uuid, $2::text, coalesce((SELECT version FROM latest), 0) + 1, $3::bytea, $4::bytea
  WHERE NOT EXISTS (SELECT FROM latest WHERE digest = $3::bytea)
  RETURNING pk_workflow, version
)
SELECT pk_workflow, version, true AS made FROM made
UNION ALL
SELECT pk_workflow, version, false FROM latest WHERE digest = $3::bytea

-- name: definitions
-- The latest version of every workflow of the shows $1 (null: all), with its number of live runs.
SELECT DISTINCT ON (s.str_name, w.name) s.str_name AS show, w.version, w.spec,
       (SELECT count(*) FROM rota.workflow_run r JOIN rota.workflow o USING (pk_workflow)
        WHERE o.pk_show = w.pk_show AND o.name = w.name AND r.ts_ended IS NULL) AS runs
FROM rota.workflow w JOIN rota.show s USING (pk_show)
WHERE $1::uuid[] IS NULL OR s.pk_show = ANY ($1)
ORDER BY s.str_name, w.name, w.version DESC

-- name: latest
-- Version $3 of workflow $2 in show $1; the latest when $3 is 0.
SELECT w.pk_workflow, w.version, w.spec, w.digest, s.pk_show
FROM rota.show s LEFT JOIN LATERAL (
  SELECT * FROM rota.workflow w WHERE w.pk_show = s.pk_show AND w.name = $2::text AND ($3::int = 0 OR w.version = $3)
  ORDER BY w.version DESC LIMIT 1) AS w ON true
WHERE s.str_name = $1::text

-- name: specs
-- Definitions $1.
SELECT pk_workflow, version, spec FROM rota.workflow WHERE pk_workflow = ANY ($1::bigint[])

-- name: look
-- Whether runs have inbox messages from $1 on or due timers, whether sagas have work, and ms until the next timer.
SELECT runs, sagas, in_ms FROM rota.workflow_look($1::bigint)

-- name: explain_run
-- Unprocessed inbox messages of run $1, when it was paused, and the leader by the lease $2.
SELECT (SELECT count(*) FROM rota.workflow_news n WHERE n.workflow_id = $1::uuid::text) AS news,
       ARRAY(SELECT s.pk_job FROM rota.workflow_news n JOIN rota.scan s USING (pk_job)
             WHERE n.workflow_id = $1::uuid::text ORDER BY 1 LIMIT 5) AS scanned,
       (SELECT count(*) FROM rota.workflow_timer t WHERE t.pk_run = $1::uuid AND t.ts_due <= clock_timestamp()) AS due,
       (SELECT l.holder FROM rota.lease l WHERE l.name = $2::text AND l.expires_at > clock_timestamp()) AS leader,
       p.at AS paused_at, p.told::text AS paused, clock_timestamp() AS now
FROM (SELECT) AS one LEFT JOIN LATERAL (
  SELECT e.at, e.told FROM rota.workflow_event e WHERE e.pk_run = $1::uuid AND e.told @> '[{"what": "paused"}]'
  ORDER BY e.fence DESC LIMIT 1) AS p ON true

-- name: rerun_entries
-- Compensations of the jobs $1 and of earlier attempts of their steps, with their states and whether their run is live;
-- locks their sagas.
SELECT e.pk_job, n.pk_job AS last, e.state, s.state AS saga, s.workflow_id, EXISTS (
         SELECT FROM rota.workflow_run r
         WHERE r.pk_run = CASE WHEN rota.is_uuid(s.workflow_id) THEN s.workflow_id::uuid END
           AND r.pk_show = s.pk_show AND r.ts_ended IS NULL) AS goes_on
FROM (SELECT DISTINCT ON (pk_saga, step) pk_saga, step, pk_job FROM rota.saga_entry WHERE pk_job = ANY ($1::uuid[])) AS n
JOIN rota.saga_entry e USING (pk_saga, step) JOIN rota.saga s USING (pk_saga)
ORDER BY s.pk_saga FOR NO KEY UPDATE OF s

-- name: rerun_runs
-- Those of the ids $1 that are runs, with their status.
SELECT pk_run, steps FROM rota.workflow_run WHERE pk_run = ANY ($1::uuid[])

-- name: rerun_take_over
-- Move the compensations of the jobs $3 to run $2 of show $1.
WITH before AS (
  UPDATE rota.saga s SET fence = s.fence
  WHERE s.pk_saga IN (SELECT e.pk_saga FROM rota.saga_entry e WHERE e.pk_job = ANY ($3::uuid[]))
), made AS (
  INSERT INTO rota.saga (pk_show, workflow_id) VALUES ($1::uuid, $2::text) RETURNING pk_saga
)
UPDATE rota.saga_entry e SET pk_saga = made.pk_saga FROM made WHERE e.pk_job = ANY ($3::uuid[]) AND e.state = 'pending'

-- name: copy
-- Set the status of run $1 to $4, and copy the results of the steps $3 of run $2.
WITH state AS (UPDATE rota.workflow_run SET steps = $4::bytea WHERE pk_run = $1::uuid)
INSERT INTO rota.workflow_value (pk_run, place, value)
SELECT $1::uuid, v.place, v.value FROM rota.workflow_value v WHERE v.pk_run = $2::uuid AND v.place = ANY ($3::smallint[])

-- name: ended
-- Lock the run $1 if it has ended: serialises reruns.
SELECT pk_run, pk_show, pk_workflow, steps, input FROM rota.workflow_run WHERE pk_run = $1::uuid AND ts_ended IS NOT NULL
FOR NO KEY UPDATE

-- name: keyed
-- The runs of show $1 with the keys $2.
SELECT key, pk_run, pk_workflow, input FROM rota.workflow_run WHERE pk_show = $1::uuid AND key = ANY ($2::text[])

-- name: saga_resume
-- Start the rollback of saga $2 of show $1, or retry failed compensations, for the reason $3; returns their number.
SELECT rota.saga_resume($1::uuid, $2::text, $3::text) AS entries

-- name: timelines
-- History of the runs $1 after their advances $2; a row without an event for a run without new ones.
SELECT g.pk_run, e.fence, e.at, e.told
FROM unnest($1::uuid[], $2::bigint[]) AS g (pk_run, after)
JOIN rota.workflow_run r USING (pk_run)
LEFT JOIN rota.workflow_event e ON e.pk_run = g.pk_run AND e.fence > g.after
ORDER BY g.pk_run, e.fence

-- name: get
-- The run $1 with its definition.
SELECT r.pk_run, r.pk_show, s.str_name AS show, w.name, w.version, w.spec, r.state, r.error, r.steps, r.input, r.output,
       r.pk_parent, r.ts_started, r.ts_ended
FROM rota.workflow_run r JOIN rota.workflow w USING (pk_workflow) JOIN rota.show s ON s.pk_show = r.pk_show
WHERE r.pk_run = $1::uuid

-- name: list
-- Up to $5 runs before run $4, newest first, of shows $1 by name or $6 by id, workflow $2 and state $3; null: any.
SELECT r.pk_run, s.str_name AS show, w.name, w.version, r.state, r.error, r.ts_started, r.ts_ended
FROM rota.workflow_run r JOIN rota.workflow w USING (pk_workflow) JOIN rota.show s ON s.pk_show = r.pk_show
WHERE ($1::text[] IS NULL OR s.str_name = ANY ($1)) AND ($2::text IS NULL OR w.name = $2)
  AND ($3::text IS NULL OR r.state = $3) AND ($4::uuid IS NULL OR r.pk_run < $4)
  AND ($6::uuid[] IS NULL OR r.pk_show = ANY ($6))
ORDER BY r.pk_run DESC LIMIT $5::int

-- name: saga_show
-- The saga $2 of show $1 with its entries, last recorded first.
SELECT s.state AS saga, s.reason, e.number, e.pk_job, e.step, e.state, e.attempt, e.pk_undo, e.error
FROM rota.saga s LEFT JOIN rota.saga_entry e USING (pk_saga)
WHERE s.pk_show = $1::uuid AND s.workflow_id = $2::text ORDER BY e.number DESC

-- name: states
-- The states of runs $1.
SELECT pk_run, state FROM rota.workflow_run WHERE pk_run = ANY ($1::uuid[])

-- name: timeline
-- History of run $1 after its advance number $2.
SELECT fence, at, told FROM rota.workflow_event WHERE pk_run = $1::uuid AND fence > $2::bigint ORDER BY fence

-- name: timers
-- The timers of run $1.
SELECT place, attempt, ts_due FROM rota.workflow_timer WHERE pk_run = $1::uuid ORDER BY ts_due

-- name: saga_active
-- Number of sagas that are rolling back.
SELECT count(*) FROM rota.saga WHERE state = 'rolling_back'

-- name: saga_begun
-- Mark the entries $1, $2 as run by jobs $3.
UPDATE rota.saga_entry e SET state = 'running', pk_undo = g.job, ts_changed = clock_timestamp()
FROM unnest($1::bigint[], $2::bigint[], $3::uuid[]) AS g (pk_saga, number, job)
WHERE e.pk_saga = g.pk_saga AND e.number = g.number AND e.state = 'pending'

-- name: saga_due
-- Lock up to $1 sagas that roll back without a running compensation, each with its next entry and the name of its show.
SELECT d.pk_saga, d.pk_show, d.workflow_id, d.number, d.pk_job, d.step, d.template, d.attempt, d.took_s,
       coalesce((SELECT w.str_name FROM rota.show w WHERE w.pk_show = d.pk_show), d.pk_show::text) AS show
FROM rota.saga_due($1::int) AS d

-- name: saga_end
-- End the sagas $1, which have nothing left to undo.
SELECT rota.saga_end($1::bigint[])

-- name: saga_ended
-- States of the ended sagas $1.
SELECT pk_saga, state FROM rota.saga WHERE pk_saga = ANY ($1::bigint[])

-- name: saga_over
-- End the entries $1, $2 of sagas in state $3, for reason $4.
UPDATE rota.saga_entry e SET state = g.state, error = g.error, ts_changed = clock_timestamp()
FROM unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[]) AS g (pk_saga, number, state, error)
WHERE e.pk_saga = g.pk_saga AND e.number = g.number AND e.state = 'pending'

-- name: saga_record
-- Record compensations of the jobs $3 in the sagas $1, $2; returns the number of new ones.
SELECT rota.saga_record($1::uuid[], $2::text[], $3::uuid[], $4::text[], $5::bytea[], $6::text[])

-- name: saga_roll_back
-- Start the rollback of the sagas $1, $2 for reason $3; returns those with something to undo.
SELECT rota.saga_roll_back($1::uuid[], $2::text[], $3::text) AS workflow_id

-- name: saga_take
-- Take ends of up to $1 jobs for sagas: compensations, and jobs that do not belong to a live run.
SELECT kind, workflow_id, pk_show, pk_job, state, request, code, error, of_run FROM rota.saga_take($1::int)

-- name: saga_undone
-- End the compensations $1 in state $2, for reason $3; a row for each that was awaited.
UPDATE rota.saga_entry e SET state = g.state, error = g.error, ts_changed = clock_timestamp()
FROM unnest($1::uuid[], $2::text[], $3::text[]) AS g (job, state, error), rota.saga s
WHERE e.pk_undo = g.job AND e.state = 'running' AND s.pk_saga = e.pk_saga
RETURNING e.pk_saga, e.number, e.pk_job, e.pk_undo, e.state, e.error, e.attempt, e.step, s.pk_show, s.workflow_id

-- name: approval_decided
-- Add a message to the inbox of run $1 of show $2: approval $3 is in state $4, for reason $5, with the output $6.
INSERT INTO rota.workflow_news (kind, workflow_id, pk_show, pk_job, state, reason, request)
VALUES ('approval', $1::text, $2::uuid, $3::uuid, $4::text, $5::text, $6::bytea)

-- name: approval_runs
-- The runs $1 with their definitions, for the approvals of their steps.
SELECT r.pk_run, r.pk_show, r.pk_workflow, r.steps, r.input, r.actor, w.digest
FROM rota.workflow_run r JOIN rota.workflow w USING (pk_workflow) WHERE r.pk_run = ANY ($1::uuid[])

-- name: approval_stopped
-- Whether run $1 has an unprocessed cancel message.
SELECT EXISTS (SELECT FROM rota.workflow_news WHERE kind = 'cancel' AND workflow_id = $1::text)

-- name: approval_withdraw
-- Withdraw the approvals of the steps $1.
SELECT rota.approvals_close('step', $1::text[])

-- name: lock
-- Lock the run $1 if it is live.
SELECT pk_run, pk_show, pk_workflow, state, steps, fence, input, pk_root, depth, actor, rota.now_ms() AS now_ms
FROM rota.workflow_run WHERE pk_run = $1::uuid AND ts_ended IS NULL FOR NO KEY UPDATE
