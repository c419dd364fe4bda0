-- name: dlq_add
-- Add dead letters; a known cause is left unchanged.
WITH added AS (
  INSERT INTO rota.dlq_entries (kind, reason, cause, queue, job_id, payload, error)
  SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::uuid[], $6::bytea[], $7::text[])
  ON CONFLICT (kind, cause) DO NOTHING
  RETURNING 1
)
SELECT count(*) FROM added

-- name: dlq_count
-- Number of dead letters that match the filter.
SELECT count(*) FROM rota.dlq_entries d
WHERE ($1::bigint[] IS NULL OR d.dlq_id = ANY ($1)) AND ($2::text IS NULL OR d.kind = $2)
  AND ($3::text IS NULL OR d.reason = $3) AND ($4::text IS NULL OR d.queue = $4)
  AND ($5::uuid IS NULL OR d.job_id = $5) AND ($6::timestamptz IS NULL OR d.created_at < $6)

-- name: dlq_find
-- Dead letters that match the filter, starting after id $7, at most $8.
SELECT d.dlq_id AS id, d.kind, d.reason, d.cause, d.queue, d.job_id AS job, d.layer_id AS layer, d.frame, d.attempt,
       d.payload, d.error, d.created_at
FROM rota.dlq_entries d
WHERE ($1::bigint[] IS NULL OR d.dlq_id = ANY ($1)) AND ($2::text IS NULL OR d.kind = $2)
  AND ($3::text IS NULL OR d.reason = $3) AND ($4::text IS NULL OR d.queue = $4)
  AND ($5::uuid IS NULL OR d.job_id = $5) AND ($6::timestamptz IS NULL OR d.created_at < $6)
  AND d.dlq_id > $7::bigint
ORDER BY d.dlq_id
LIMIT $8::int

-- name: dlq_remove
-- Remove dead letters that match the filter, at most $7; requeue frames if $8.
SELECT id FROM rota.queue_dlq_remove(ARRAY(
  SELECT d.dlq_id FROM rota.dlq_entries d
  WHERE ($1::bigint[] IS NULL OR d.dlq_id = ANY ($1)) AND ($2::text IS NULL OR d.kind = $2)
  AND ($3::text IS NULL OR d.reason = $3) AND ($4::text IS NULL OR d.queue = $4)
  AND ($5::uuid IS NULL OR d.job_id = $5) AND ($6::timestamptz IS NULL OR d.created_at < $6)
  ORDER BY d.dlq_id LIMIT $7::int), $8::boolean) AS id

-- name: failed_bury
-- Move failed frames that match the filter to the dead letters, at most $6.
SELECT token FROM rota.move_failed_to_dlq(ARRAY(
  SELECT d.token FROM rota.done_entries d JOIN rota.queue_lanes l ON l.lane_id = d.lane_id
  WHERE ($1::bigint[] IS NULL OR d.token = ANY ($1)) AND ($2::text IS NULL OR d.reason = $2)
  AND ($3::text IS NULL OR l.queue = $3) AND ($4::uuid IS NULL OR d.job_id = $4)
  AND ($5::timestamptz IS NULL OR d.failed_at < $5)
  ORDER BY d.token LIMIT $6::int)) AS token

-- name: failed_count
-- Number of failed frames that match the filter.
SELECT count(*) FROM rota.done_entries d JOIN rota.queue_lanes l ON l.lane_id = d.lane_id
WHERE ($1::bigint[] IS NULL OR d.token = ANY ($1)) AND ($2::text IS NULL OR d.reason = $2)
  AND ($3::text IS NULL OR l.queue = $3) AND ($4::uuid IS NULL OR d.job_id = $4)
  AND ($5::timestamptz IS NULL OR d.failed_at < $5)

-- name: failed_discard
-- Delete failed frames that match the filter, at most $6; they are no longer counted.
SELECT token FROM rota.queue_discard(ARRAY(
  SELECT d.token FROM rota.done_entries d JOIN rota.queue_lanes l ON l.lane_id = d.lane_id
  WHERE ($1::bigint[] IS NULL OR d.token = ANY ($1)) AND ($2::text IS NULL OR d.reason = $2)
  AND ($3::text IS NULL OR l.queue = $3) AND ($4::uuid IS NULL OR d.job_id = $4)
  AND ($5::timestamptz IS NULL OR d.failed_at < $5)
  ORDER BY d.token LIMIT $6::int), false) AS token

-- name: failed_expire
-- Delete failed frames that failed more than $1 seconds ago, at most $2; the rollup keeps counting them.
SELECT token FROM rota.queue_discard(ARRAY(
  SELECT d.token FROM rota.done_entries d
  WHERE d.failed_at < clock_timestamp() - make_interval(secs => $1::float8)
  ORDER BY d.failed_at LIMIT $2::int), true) AS token

-- name: failed_find
-- Failed frames that match the filter, starting after token $6, at most $7.
SELECT d.token, l.queue, d.job_id AS job, d.layer_id AS layer, d.frame, d.attempt, d.payload, d.reason, d.error,
       d.failed_at
FROM rota.done_entries d JOIN rota.queue_lanes l ON l.lane_id = d.lane_id
WHERE ($1::bigint[] IS NULL OR d.token = ANY ($1)) AND ($2::text IS NULL OR d.reason = $2)
  AND ($3::text IS NULL OR l.queue = $3) AND ($4::uuid IS NULL OR d.job_id = $4)
  AND ($5::timestamptz IS NULL OR d.failed_at < $5)
  AND d.token > $6::bigint
ORDER BY d.token
LIMIT $7::int

-- name: failed_retry
-- Requeue failed frames that match the filter, at most $6.
SELECT token FROM rota.retry_job_tx(ARRAY(
  SELECT d.token FROM rota.done_entries d JOIN rota.queue_lanes l ON l.lane_id = d.lane_id
  WHERE ($1::bigint[] IS NULL OR d.token = ANY ($1)) AND ($2::text IS NULL OR d.reason = $2)
  AND ($3::text IS NULL OR l.queue = $3) AND ($4::uuid IS NULL OR d.job_id = $4)
  AND ($5::timestamptz IS NULL OR d.failed_at < $5)
  ORDER BY d.token LIMIT $6::int)) AS token

-- name: owner_forget
-- Delete a dead owner that has no open claims left.
DELETE FROM rota.queue_owners WHERE owner = $1::bigint AND dead

-- name: counts_version
-- Changes with the counts, and with what is parked or paused; null: unknown.
SELECT rota.queue_counts_version()

-- name: frames_due
-- Whether deferred entries are due, and whether there are owners without a lease.
SELECT EXISTS (SELECT FROM rota.deferred_jobs d WHERE d.run_at <= now()) AS deferred,
       EXISTS (SELECT FROM rota.queue_owners o WHERE o.dead OR NOT EXISTS (
         SELECT FROM rota.lease l WHERE l.name = o.lease AND l.fence = o.owner AND l.expires_at > now())) AS unowned

-- name: storage_due
-- Whether deltas wait to be folded, whether the open slot holds $1 bytes, or is $2 seconds old and not empty, and whether
-- counters are trusted.
SELECT EXISTS (SELECT FROM rota.queue_terminal_count_deltas) AS deltas,
       rota.queue_rotation_due($1::bigint, make_interval(secs => $2::float8)) AS rotation,
       rota.queue_counters_hold() AS counted

-- name: owners_bury
-- Mark owners dead whose lease has ended; returns all dead ones.
SELECT owner FROM rota.queue_bury_owners() AS owner

-- name: cancel_running
-- Cancel claimed positions.
SELECT claim_id, refused FROM rota.queue_cancel_running($1::bigint[], $2::varbit[])

-- name: cancel_waiting
-- Cancel waiting frames of job $1, in layer $2 or all, from frame $3 to frame $4.
SELECT rota.queue_cancel_waiting($1::uuid, $2::uuid, $3::int, $4::int)

-- name: candidates
-- Lanes of these queues, or of all, with claimable entries.
SELECT lane_id, queue, priority, waiting, parked FROM rota.queue_candidates($1::text[])

-- name: claim
-- Claim waiting positions of lanes $1 for owner $4; request $2 of each lane wants as many as $3 says. A row per claim, and
-- one without a claim per locked lane.
SELECT request, lane_id, claim_id, n, first_seq, skipped, sizes, jobs, layers, frames, attempts, payloads
FROM rota.queue_claim_each($1::int[], $2::int[], $3::int[], $4::bigint)

-- name: claims_lock
-- Lock these claims in order, before ends of several kinds are written in one transaction.
SELECT pg_advisory_xact_lock(1903519027, key) FROM (
  SELECT DISTINCT (id & 2147483647)::integer AS key FROM unnest($1::bigint[]) AS id ORDER BY key) AS sorted

-- name: complete
-- Complete claimed positions; a row per claim with refused ones.
SELECT claim_id, refused FROM rota.insert_done_rows_tx($1::bigint[], $2::varbit[])

-- name: counts_exact
-- Exact counts of these queues, or of all.
SELECT queue, waiting, running, deferred, completed, failed, cancelled, dead FROM rota.queue_counts_exact($1::text[])

-- name: counts_fast
-- Counts of these queues, or of all, as of the last fold.
SELECT queue, waiting, running, deferred, completed, failed, cancelled, dead FROM rota.queue_counts_fast($1::text[])

-- name: enqueue
-- Append entries to their lanes; a row per group with the lane and the first position.
SELECT lane_id, first_seq FROM rota.queue_enqueue(
  $1::text[], $2::smallint[], $3::text[], $4::int[],
  $5::uuid[], $6::uuid[], $7::int[], $8::int[], $9::smallint[], $10::bytea[], $11::boolean)

-- name: enqueue_later
-- Store entries until they are due.
SELECT rota.queue_defer(
  $1::text[], $2::smallint[], $3::timestamptz[],
  $4::uuid[], $5::uuid[], $6::int[], $7::int[], $8::smallint[], $9::bytea[])

-- name: fail
-- Fail claimed positions for good, each with a reason and an error text.
SELECT claim_id, refused FROM rota.queue_fail($1::bigint[], $2::varbit[], $3::bigint[], $4::text[], $5::text[])

-- name: give_back
-- Give claimed positions back, parked for job $3 unless null.
SELECT claim_id, refused FROM rota.queue_give_back($1::bigint[], $2::varbit[], $3::uuid)

-- name: heads
-- Waiting time of the next frame of each lane.
SELECT lane_id, extract(epoch FROM clock_timestamp() - enqueued_at)::float8 AS age_s FROM rota.queue_heads($1::int[])

-- name: look
-- Frame and attempt of claimed positions.
SELECT token, job_id, layer_id, frame, attempt FROM rota.queue_look($1::bigint[], $2::varbit[])

-- name: owner_add
-- Allow a dispatcher that holds lease $2 under fence $1 to claim.
INSERT INTO rota.queue_owners (owner, lease) VALUES ($1::bigint, $2::text) ON CONFLICT DO NOTHING

-- name: owner_claims
-- Open positions of claims of owner $1.
SELECT claim_id, open FROM rota.queue_open_claims($1::bigint)

-- name: park_rest
-- Park the next entries of job $2 in each of these lanes.
SELECT coalesce(sum(rota.queue_park_rest(lane, $2::uuid)), 0)::bigint
FROM (SELECT DISTINCT unnest($1::int[]) AS lane ORDER BY 1) AS sorted

-- name: queue_list
-- Queues by name, those among $1 or all.
SELECT queue, enqueue_shards AS shards, paused, dlq_on_fail FROM rota.queues
WHERE $1::text[] IS NULL OR queue = ANY ($1) ORDER BY queue

-- name: queue_make
-- Create queue $1 with lanes for the priorities $2, or change its settings; null keeps the current value.
WITH made AS (
  INSERT INTO rota.queues AS q (queue, enqueue_shards, dlq_on_fail)
  VALUES ($1::text, coalesce($3::smallint, 4), coalesce($4::boolean, false))
  ON CONFLICT (queue) DO UPDATE
  SET enqueue_shards = coalesce($3::smallint, q.enqueue_shards), dlq_on_fail = coalesce($4::boolean, q.dlq_on_fail)
  RETURNING queue, enqueue_shards
)
INSERT INTO rota.queue_lanes (queue, priority, enqueue_shard)
SELECT made.queue, priority, shard FROM made, unnest($2::smallint[]) AS priority,
  generate_series(0, made.enqueue_shards - 1) AS shard
ON CONFLICT DO NOTHING

-- name: queue_pause
-- Pause or resume queue $1, and notify dispatchers.
UPDATE rota.queues SET paused = $2::boolean WHERE queue = $1::text

-- name: rebuild
-- Rebuild all counts from the rows, and set the counter mode unless null.
SELECT rota.queue_rebuild_counts($1::text)

-- name: retry
-- End claimed positions and requeue their frames $3 seconds from now; $4: an attempt was used.
SELECT claim_id, refused FROM rota.queue_retry(
  $1::bigint[], $2::varbit[], make_interval(secs => $3::float8), $4::boolean)

-- name: unpark
-- Unpark up to $2 positions of job $1.
SELECT rota.queue_unpark($1::uuid, $2::bigint)

-- name: wake
-- Notify dispatchers that entries may be claimable.
SELECT pg_notify('rota_queue', $1::text)

-- name: carry
-- Carry about $2 live entries of the oldest slot out of the ring, waiting at most $1 ms for its lock.
SELECT rota.queue_carry($1::int, $2::int)

-- name: fold
-- Fold pending deltas into the live counts, or only merge them while a session pins old rows.
SELECT turn, deltas, done FROM rota.queue_fold($1::boolean)

-- name: pins
-- Sessions whose transaction is older than $1 seconds and keeps old row versions alive.
SELECT pid, application, age_s, state FROM rota.queue_pins(make_interval(secs => $1::float8))

-- name: promote
-- Queue up to $1 deferred entries that are due.
SELECT rota.queue_promote($1::int)

-- name: prunable
-- Sealed slots with rows that may all have ended.
SELECT slot FROM rota.queue_prunable() AS slot

-- name: prune
-- Truncate slot $1 if everything in it has ended, waiting $2 ms for its lock. Null: the oldest, judged by its rows
-- alone.
SELECT rota.queue_prune(coalesce($1::int, ((rota.queue_generation() + 1) % 7)::int), $2::int, $1::int IS NULL)

-- name: rotate
-- Open a new slot when the open one holds $1 bytes, or is $2 seconds old and not empty.
SELECT rota.queue_rotate($1::bigint, make_interval(secs => $2::float8))

-- name: shed
-- Delete ended rows outside of the ring if $1, otherwise in its oldest slot.
SELECT rota.queue_shed($1::boolean)

-- name: report_sessions
-- Sessions in a transaction for longer than $1 seconds that keep dead rows alive or use tables of a slot.
SELECT a.pid, a.application_name AS application,
       extract(epoch FROM clock_timestamp() - a.xact_start)::float8 AS age_s, a.state,
       a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL AS pins, coalesce(h.slots, '{}') AS slots
FROM pg_stat_activity a
LEFT JOIN (
  SELECT l.pid, array_agg(DISTINCT right(c.relname, 1)::int) AS slots
  FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
  WHERE l.granted AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
    AND c.relnamespace = 'rota'::regnamespace
    AND c.relname ~ '^(ready_entries|queue_claims|queue_closures)_[0-7]$'
  GROUP BY 1
) AS h ON h.pid = a.pid
WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
  AND a.xact_start < clock_timestamp() - make_interval(secs => $1::float8)
  AND (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL OR h.slots IS NOT NULL)
ORDER BY a.xact_start

-- name: report_slots
-- Each slot of the ring, and slot 7 outside of it: generation, size, waiting and running frames, by counters or by
-- rows.
SELECT n.slot AS number, CASE WHEN n.slot < 7 THEN g.generation - (g.generation - n.slot) % 7 END AS generation,
       n.slot = g.generation % 7 AS is_open,
       pg_total_relation_size(format('rota.ready_entries_%s', n.slot)::regclass)
         + pg_total_relation_size(format('rota.queue_claims_%s', n.slot)::regclass)
         + pg_total_relation_size(format('rota.queue_closures_%s', n.slot)::regclass) AS bytes,
       coalesce(c.waiting, 0) AS waiting, coalesce(c.running, 0) AS running,
       pg_relation_size(format('rota.ready_entries_%s', n.slot)::regclass)
         + pg_relation_size(format('rota.queue_claims_%s', n.slot)::regclass) > 0 AS holds
FROM (SELECT rota.queue_generation() AS generation) AS g CROSS JOIN generate_series(0, 7) AS n (slot)
LEFT JOIN (
  SELECT u.ready_slot, sum(u.waiting)::bigint AS waiting, sum(u.running)::bigint AS running
  FROM (
    SELECT d.ready_slot, d.waiting, d.running FROM rota.queue_terminal_count_deltas d WHERE rota.queue_counters_hold()
    UNION ALL
    SELECT l.ready_slot, l.waiting, l.running FROM rota.queue_terminal_live_counts l WHERE rota.queue_counters_hold()
    UNION ALL
    SELECT s.ready_slot, s.waiting, s.running
    FROM (SELECT WHERE NOT rota.queue_counters_hold()) AS distrusted, LATERAL rota.queue_scan() AS s
  ) AS u GROUP BY 1
) AS c ON c.ready_slot = n.slot
ORDER BY n.slot

-- name: report_state
-- Counter mode and lag of the counts, the open slot, and the holder of the maintenance lease $1.
SELECT s.counter_mode, s.counters_trusted, d.pending AS pending_deltas, r.generation,
       extract(epoch FROM clock_timestamp() - r.rotated_at)::float8 AS open_s,
       (SELECT l.holder FROM rota.lease l WHERE l.name = $1::text AND l.expires_at > clock_timestamp()) AS keeper,
       clock_timestamp() AS as_of
FROM (SELECT count(*) AS pending FROM rota.queue_terminal_count_deltas) AS d, rota.queue_storage AS s,
     (SELECT generation, rotated_at FROM rota.queue_ring_rotations ORDER BY generation DESC LIMIT 1) AS r

-- name: report_tables
-- Tables outside of the ring, with their size and the row estimates of PostgreSQL.
SELECT t.name, pg_total_relation_size(s.relid) AS bytes, s.n_live_tup AS rows, s.n_dead_tup AS dead_rows
FROM unnest($1::text[]) WITH ORDINALITY AS t (name, place)
JOIN pg_stat_user_tables s ON s.schemaname = 'rota' AND s.relname = t.name
ORDER BY t.place
