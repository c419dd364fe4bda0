-- name: backfill
-- Run an agent for past slots from $3 to $4, starting at $2; with nulls, stop. Returns the next due time in ms.
UPDATE rota.agent
SET ts_backfill_due = to_timestamp($2::bigint / 1000.0), ts_backfill_slot = to_timestamp($3::bigint / 1000.0),
    ts_backfill_until = to_timestamp($4::bigint / 1000.0)
WHERE name = $1
RETURNING (extract(epoch FROM ts_next) * 1000)::bigint

-- name: change
-- Pause or resume an agent, move its due time, or request one more run; returns the next due time in ms.
UPDATE rota.agent
SET paused = $2, queued = $3, ts_due = to_timestamp($4::bigint / 1000.0), ts_slot = to_timestamp($5::bigint / 1000.0)
WHERE name = $1
RETURNING (extract(epoch FROM ts_next) * 1000)::bigint

-- name: history
-- The last runs of an agent, latest first.
SELECT run, replica, outcome, failure, error, took_ms, backfill, ts_slot, ts_due, ts_started
FROM rota.agent_run WHERE name = $1 ORDER BY ts_started DESC, run DESC LIMIT $2

-- name: list
-- Agents with their current and last run: those named $1, or all, after $2, at most $3.
SELECT a.name, a.shard_group, a.spec::text AS spec, a.ts_next, a.ts_backfill_slot, a.ts_backfill_until, a.paused, a.queued, a.streak, a.failure, a.error, a.runs,
       r.run, r.replica, r.ts_acquired, r.ts_deadline, coalesce(r.quarantined, false) AS quarantined,
       h.outcome AS last_outcome, h.took_ms AS last_took_ms, h.ts_started AS last_started
FROM rota.agent a
LEFT JOIN rota.agent_running r ON r.name = a.name
LEFT JOIN rota.agent_run h ON h.name = a.name AND h.place = (a.runs - 1) % 50
WHERE ($1::text[] IS NULL OR a.name = ANY ($1::text[])) AND a.name > $2
ORDER BY a.name LIMIT $3

-- name: lock
-- Lock an agent against begin, end and change until the transaction ends.
SELECT a.spec::text AS spec, a.paused, a.queued, (extract(epoch FROM a.ts_due) * 1000)::bigint AS due_ms,
       (extract(epoch FROM a.ts_slot) * 1000)::bigint AS slot_ms,
       a.ts_backfill_slot IS NOT NULL AS backfilling,
       (SELECT r.replica FROM rota.agent_running r WHERE r.name = a.name) AS replica
FROM rota.agent a WHERE a.name = $1 FOR UPDATE

-- name: remove
-- Delete an agent and its history, unless it runs on a member that was alive within the last $2 seconds.
WITH living AS (
  SELECT FROM rota.agent_running r WHERE r.name = $1 AND rota.agents_member_lives(r.lease, r.fence, $2::float8)
), lost AS (
  DELETE FROM rota.agent_running r WHERE r.name = $1 AND NOT EXISTS (SELECT FROM living)
)
DELETE FROM rota.agent a WHERE a.name = $1 AND NOT EXISTS (SELECT FROM living)

-- name: wake
-- Wake all schedulers.
SELECT pg_notify('rota_agents', $1)

-- name: begin
-- Begin runs, under the member's lease $1 with fence $2, of those of the agents $4 that may begin; $3 is our replica.
SELECT name, verdict, due_ms, slot_ms, streak, backfill, token
FROM rota.agents_begin($1::text, $2::bigint, $3::text, $4::text[], $5::bigint[], $6::bigint, $7::bigint[])

-- name: block
-- Allocate a block of run numbers.
SELECT nextval('rota.agent_run_block')

-- name: declare
-- Insert or update agents. An agent whose schedule changed is due by the new one ($6), counted from now.
INSERT INTO rota.agent AS a (name, shard_group, spec, ts_due, ts_slot)
SELECT given.name, given.shard_group, given.spec::jsonb, to_timestamp(given.due_ms / 1000.0), to_timestamp(given.slot_ms / 1000.0)
FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[], $5::bigint[]) AS given (name, shard_group, spec, due_ms, slot_ms)
ORDER BY given.name
ON CONFLICT (name) DO UPDATE
SET shard_group = EXCLUDED.shard_group, spec = EXCLUDED.spec,
    ts_due = CASE WHEN a.spec -> 'schedule' = EXCLUDED.spec -> 'schedule' THEN a.ts_due
                  ELSE (SELECT to_timestamp(n.next_ms / 1000.0) FROM unnest($1::text[], $6::bigint[]) AS n (name, next_ms)
                        WHERE n.name = a.name) END,
    ts_slot = CASE WHEN a.spec -> 'schedule' = EXCLUDED.spec -> 'schedule' THEN a.ts_slot
                   ELSE (SELECT to_timestamp(n.next_ms / 1000.0) FROM unnest($1::text[], $6::bigint[]) AS n (name, next_ms)
                         WHERE n.name = a.name) END
WHERE (a.spec, a.shard_group) IS DISTINCT FROM (EXCLUDED.spec, EXCLUDED.shard_group)

-- name: end
-- End our runs ($3, a list of objects), under the member's lease $1 with fence $2; returns those that were ours.
SELECT name, run, due_ms FROM rota.agents_end($1::text, $2::bigint, $3::text::jsonb)

-- name: fence
-- Fail unless the lease $1 with fence $2 is the last one that was granted and has not expired.
SELECT rota.assert_fence($1::text, $2::bigint)

-- name: groups
-- Those of the agents $1 that exist, with their shard group.
SELECT a.name, a.shard_group FROM rota.agent a WHERE a.name = ANY ($1::text[])

-- name: idle
-- Those of the agents $1 that wait and have no run, with their due times in ms.
SELECT a.name, (extract(epoch FROM a.ts_next) * 1000)::bigint AS due_ms
FROM rota.agent a
WHERE a.name = ANY ($1::text[]) AND NOT a.paused AND a.ts_next IS NOT NULL
  AND NOT EXISTS (SELECT FROM rota.agent_running r WHERE r.name = a.name)
ORDER BY a.ts_next, a.name

-- name: jobs
-- Agents that submit a job, which any server can run.
SELECT a.spec::text AS spec FROM rota.agent a WHERE a.spec -> 'job' IS NOT NULL ORDER BY a.name

-- name: members
-- Live members whose lease name begins with $1, and the fence of each.
SELECT l.name, l.fence FROM rota.lease l
WHERE starts_with(l.name, $1::text) AND l.holder IS NOT NULL AND l.expires_at > clock_timestamp()
ORDER BY l.name

-- name: quarantine
-- Set or clear the quarantine flag of a run.
UPDATE rota.agent_running r SET quarantined = $3
WHERE r.name = $1 AND r.run = $2

-- name: seize
-- Take over at most $4 runs of members whose lease expired $3 seconds ago, under the leader's lease $1 with fence $2.
SELECT s.name, s.run, s.due_ms, a.shard_group
FROM rota.agents_seize($1::text, $2::bigint, $3::float8, $4::integer) AS s JOIN rota.agent a ON a.name = s.name

-- name: standing
-- The current run of the agents $1, and when they are due (ms); null if they are not.
SELECT a.name, r.run, CASE WHEN NOT a.paused THEN (extract(epoch FROM a.ts_next) * 1000)::bigint END AS due_ms
FROM rota.agent a LEFT JOIN rota.agent_running r ON r.name = a.name
WHERE a.name = ANY ($1::text[])
