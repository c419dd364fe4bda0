-- Counts from the rows, by slot and lane. Slow; for the mode `scan`, for untrusted counters and for rebuilding. Stable,
-- so that it uses the snapshot of the calling statement.
CREATE OR REPLACE FUNCTION rota.queue_scan() RETURNS SETOF rota.queue_slot_counts
LANGUAGE plpgsql STABLE AS $$
BEGIN
  RETURN QUERY
    WITH filled AS MATERIALIZED (
      SELECT l.lane_id, greatest(b.cursor, c.next, 0) AS cursor
      FROM rota.queue_lanes l
      LEFT JOIN rota.queue_lane_bases b ON b.lane_id = l.lane_id
      LEFT JOIN (SELECT lane_id, max(last_seq) + 1 AS next FROM rota.queue_claims GROUP BY 1) AS c
        ON c.lane_id = l.lane_id
    ), found (lane_id, slot, waiting, running, completed, cancelled, failed, deferred, dead) AS (
      SELECT e.lane_id, e.ready_slot::integer, sum(greatest(0, e.lane_seq + e.n - greatest(e.lane_seq, f.cursor))),
             0, 0, 0, 0, 0, 0
      FROM rota.ready_entries e JOIN filled f ON f.lane_id = e.lane_id GROUP BY 1, 2
      UNION ALL
      SELECT t.lane_id, t.ready_slot, -sum(t.n) FILTER (WHERE t.first_seq >= f.cursor), 0, 0, sum(t.n), 0, 0, 0
      FROM rota.ready_tombstones t JOIN filled f ON f.lane_id = t.lane_id GROUP BY 1, 2
      UNION ALL
      SELECT r.lane_id, r.ready_slot, sum(r.n), 0, 0, 0, 0, 0, 0
      FROM rota.queue_returned r GROUP BY 1, 2
      UNION ALL
      SELECT c.lane_id, c.ready_slot, 0, sum(c.n), 0, 0, 0, 0, 0
      FROM rota.queue_claims c GROUP BY 1, 2
      UNION ALL
      SELECT c.lane_id, c.ready_slot, 0, -sum(x.n), sum(x.n) FILTER (WHERE x.outcome = 1),
             sum(x.n) FILTER (WHERE x.outcome = 3), 0, 0, 0
      FROM rota.queue_closures x JOIN rota.queue_claims c ON c.ready_slot = x.ready_slot AND c.claim_id = x.claim_id GROUP BY 1, 2
      UNION ALL
      SELECT d.lane_id, -1, 0, 0, 0, 0, count(*), 0, 0 FROM rota.done_entries d GROUP BY 1
      UNION ALL
      SELECT d.lane_id, -1, 0, 0, 0, 0, 0, sum(d.n), 0 FROM rota.deferred_jobs d GROUP BY 1
      UNION ALL
      SELECT d.lane_id, -1, 0, 0, 0, 0, 0, 0, count(*) FROM rota.dlq_entries d
      WHERE d.lane_id IS NOT NULL GROUP BY 1
    )
    SELECT f.lane_id, f.slot, coalesce(sum(f.waiting), 0)::bigint, coalesce(sum(f.running), 0)::bigint,
           coalesce(sum(f.completed), 0)::bigint, coalesce(sum(f.cancelled), 0)::bigint,
           coalesce(sum(f.failed), 0)::bigint, coalesce(sum(f.deferred), 0)::bigint, coalesce(sum(f.dead), 0)::bigint
    FROM found f GROUP BY 1, 2;
END $$;

-- Whether counters are trusted; otherwise rows are counted. Locks in the same order as writers of counts.
CREATE OR REPLACE FUNCTION rota.queue_counters_hold() RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
  LOCK TABLE rota.queue_terminal_count_deltas IN ACCESS SHARE MODE;
  RETURN (SELECT s.counter_mode <> 'scan' AND s.counters_trusted FROM rota.queue_storage s);
END $$;

-- Includes pruned frames; null `queues` means all of them, one row each. Volatile, so that the snapshot is taken after
-- the locks: an older one would miss a fold that this call waited for on both sides.
CREATE OR REPLACE FUNCTION rota.queue_counts_exact(queues text[] DEFAULT NULL) RETURNS SETOF rota.queue_counted
LANGUAGE plpgsql AS $$
BEGIN
  PERFORM rota.queue_read_committed();
  IF NOT rota.queue_counters_hold() THEN
    RETURN QUERY SELECT * FROM rota.queue_counts_scan(queues);
    RETURN;
  END IF;
  RETURN QUERY
    SELECT c.queue, sum(c.waiting)::bigint, sum(c.running)::bigint, sum(c.deferred)::bigint,
           sum(c.completed)::bigint, sum(c.failed)::bigint, sum(c.cancelled)::bigint, sum(c.dead)::bigint
    FROM (
      SELECT l.queue, u.waiting, u.running, u.completed, u.cancelled, u.failed, u.deferred, u.dead
      FROM (
        SELECT c.lane_id, c.waiting, c.running, c.completed, c.cancelled, c.failed, c.deferred, c.dead
        FROM rota.queue_terminal_live_counts c
        UNION ALL
        SELECT d.lane_id, d.waiting, d.running, d.completed, d.cancelled, d.failed, d.deferred, d.dead
        FROM rota.queue_terminal_count_deltas d
      ) AS u JOIN rota.queue_lanes l ON l.lane_id = u.lane_id
      UNION ALL
      SELECT r.queue, 0, 0, r.pruned_completed_count, r.pruned_cancelled_count, r.pruned_failed_count, 0, 0
      FROM rota.queue_terminal_rollups r
      UNION ALL
      SELECT q.queue, 0, 0, 0, 0, 0, 0, 0 FROM rota.queues q
    ) AS c
    WHERE queues IS NULL OR c.queue = ANY (queues) GROUP BY 1;
END $$;

COMMENT ON FUNCTION rota.queue_counts_exact IS
  'Exact counts from the live counts, the pending deltas and the rollups, in one statement.';

-- Blocks truncation of slots: with a snapshot older than a truncation the ended frames would be missing on both sides.
CREATE OR REPLACE FUNCTION rota.queue_counts_scan(queues text[] DEFAULT NULL) RETURNS SETOF rota.queue_counted
LANGUAGE plpgsql AS $$
BEGIN
  PERFORM rota.queue_read_committed();
  LOCK TABLE rota.queue_claims, rota.queue_closures, rota.ready_entries IN ACCESS SHARE MODE;
  RETURN QUERY
    SELECT c.queue, sum(c.waiting)::bigint, sum(c.running)::bigint, sum(c.deferred)::bigint,
           sum(c.completed)::bigint, sum(c.failed)::bigint, sum(c.cancelled)::bigint, sum(c.dead)::bigint
    FROM (
      SELECT l.queue, s.waiting, s.running, s.completed, s.cancelled, s.failed, s.deferred, s.dead
      FROM rota.queue_scan() AS s JOIN rota.queue_lanes l ON l.lane_id = s.lane_id
      UNION ALL
      SELECT r.queue, 0, 0, r.pruned_completed_count, r.pruned_cancelled_count, r.pruned_failed_count, 0, 0
      FROM rota.queue_terminal_rollups r
      UNION ALL
      SELECT q.queue, 0, 0, 0, 0, 0, 0, 0 FROM rota.queues q
    ) AS c
    WHERE queues IS NULL OR c.queue = ANY (queues) GROUP BY 1;
END $$;

-- Without pending deltas: late by one fold interval, and cheaper.
CREATE OR REPLACE FUNCTION rota.queue_counts_fast(queues text[] DEFAULT NULL) RETURNS SETOF rota.queue_counted
LANGUAGE plpgsql AS $$
BEGIN
  IF NOT rota.queue_counters_hold() THEN
    RETURN QUERY SELECT * FROM rota.queue_counts_scan(queues);
    RETURN;
  END IF;
  RETURN QUERY
    SELECT c.queue, sum(c.waiting)::bigint, sum(c.running)::bigint, sum(c.deferred)::bigint,
           sum(c.completed)::bigint, sum(c.failed)::bigint, sum(c.cancelled)::bigint, sum(c.dead)::bigint
    FROM (
      SELECT l.queue, s.waiting, s.running, s.completed, s.cancelled, s.failed, s.deferred, s.dead
      FROM rota.queue_terminal_live_counts s JOIN rota.queue_lanes l ON l.lane_id = s.lane_id
      UNION ALL
      SELECT r.queue, 0, 0, r.pruned_completed_count, r.pruned_cancelled_count, r.pruned_failed_count, 0, 0
      FROM rota.queue_terminal_rollups r
      UNION ALL
      SELECT q.queue, 0, 0, 0, 0, 0, 0, 0 FROM rota.queues q
    ) AS c
    WHERE queues IS NULL OR c.queue = ANY (queues) GROUP BY 1;
END $$;

-- Lanes with claimable positions; `waiting` includes `parked`.
CREATE OR REPLACE FUNCTION rota.queue_candidates(queues text[] DEFAULT NULL)
RETURNS TABLE (lane_id integer, queue text, priority smallint, waiting bigint, parked bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  counted rota.queue_slot_counts[];
BEGIN
  IF NOT rota.queue_counters_hold() THEN
    counted := ARRAY(SELECT s FROM rota.queue_scan() AS s);
  END IF;
  RETURN QUERY
    SELECT l.lane_id, l.queue, l.priority, c.waiting, coalesce(p.parked, 0)
    FROM (
      SELECT u.lane_id, sum(u.waiting)::bigint AS waiting FROM (
        SELECT c.lane_id, c.waiting FROM rota.queue_terminal_live_counts c WHERE counted IS NULL
        UNION ALL
        SELECT d.lane_id, d.waiting FROM rota.queue_terminal_count_deltas d WHERE counted IS NULL
        UNION ALL
        SELECT s.lane_id, s.waiting FROM unnest(counted) AS s
      ) AS u GROUP BY 1 HAVING sum(u.waiting) > 0
    ) AS c
    JOIN rota.queue_lanes l ON l.lane_id = c.lane_id
    JOIN rota.queues q ON q.queue = l.queue AND NOT q.paused
    LEFT JOIN (SELECT r.lane_id, sum(r.n)::bigint AS parked FROM rota.queue_returned r
               WHERE r.parked_job IS NOT NULL GROUP BY 1) AS p ON p.lane_id = c.lane_id
    WHERE (queues IS NULL OR q.queue IN (SELECT unnest(queues)))  -- hashed: there may be thousands
      AND c.waiting > coalesce(p.parked, 0)
    ORDER BY l.priority DESC, l.lane_id;
END $$;

-- A number that changes with the counts, and with what is parked or paused; null: unknown. It costs a fraction of what
-- reading the counts does. It is a linear function of them, so that a fold does not change it.
CREATE OR REPLACE FUNCTION rota.queue_counts_version() RETURNS numeric
LANGUAGE plpgsql AS $$
BEGIN
  IF NOT rota.queue_counters_hold() THEN
    RETURN NULL;
  END IF;
  RETURN (
    SELECT coalesce(sum(u.n::numeric * hashint8extended(u.key, u.kind)), 0) FROM (
      SELECT c.lane_id AS key, 1 AS kind, c.waiting + c.running * 1000003 + c.deferred * 1299709 + c.dead * 7919
               + (c.completed + c.failed + c.cancelled) * 104729 AS n
      FROM rota.queue_terminal_live_counts c
      UNION ALL
      SELECT d.lane_id, 1, d.waiting + d.running * 1000003 + d.deferred * 1299709 + d.dead * 7919
               + (d.completed + d.failed + d.cancelled) * 104729
      FROM rota.queue_terminal_count_deltas d
      UNION ALL
      SELECT r.lane_id, 2, r.n FROM rota.queue_returned r WHERE r.parked_job IS NOT NULL
      UNION ALL
      SELECT hashtext(q.queue), 3, 1 FROM rota.queues q WHERE q.paused
    ) AS u WHERE u.n <> 0);
END $$;

-- Since when the next claimable position of each lane has been waiting.
CREATE OR REPLACE FUNCTION rota.queue_heads(lanes integer[]) RETURNS TABLE (lane_id integer, enqueued_at timestamptz)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
#variable_conflict use_column
DECLARE
  generation bigint := rota.queue_generation();
  sinces timestamptz[];
  seqs bigint[];
  oldest integer;
BEGIN
  SELECT * INTO seqs, oldest FROM rota.queue_cursor_each(lanes, generation);
  SELECT array_agg(CASE WHEN u.ahead THEN rota.queue_past_tombstones(u.lane, u.cursor) ELSE u.cursor END ORDER BY u.place),
         array_agg(CASE WHEN (u.back).lane_id IS NOT NULL
                        THEN rota.queue_since((u.back).ready_slot, u.lane, (u.back).first_seq) END ORDER BY u.place)
  INTO seqs, sinces
  FROM (
    SELECT g.*, (SELECT r FROM rota.queue_returned r WHERE r.lane_id = g.lane AND r.parked_job IS NULL
                 ORDER BY r.lane_id, r.first_seq LIMIT 1) AS back,
           (SELECT t.first_seq + t.n > g.cursor FROM rota.ready_tombstones t WHERE t.lane_id = g.lane
            ORDER BY t.lane_id DESC, t.first_seq DESC LIMIT 1) AS ahead
    FROM unnest(lanes, seqs) WITH ORDINALITY AS g (lane, cursor, place)
  ) AS u;
  FOR age IN 0 .. oldest LOOP
    sinces := rota.queue_since_each(rota.queue_slot(generation, age), lanes, seqs, sinces);
    EXIT WHEN array_position(sinces, NULL) IS NULL;
  END LOOP;
  RETURN QUERY SELECT * FROM unnest(lanes, sinces) AS u (lane, since) WHERE u.since IS NOT NULL;
END $$;

-- Writes one delta, unless the mode is `scan`. Amounts are signed. Lock order of all writers of counts: deltas, then
-- `queue_storage`, then the live counts.
CREATE OR REPLACE FUNCTION rota.queue_count(
  of_slot integer, of_lane integer, waiting bigint DEFAULT 0, running bigint DEFAULT 0, completed bigint DEFAULT 0,
  cancelled bigint DEFAULT 0, failed bigint DEFAULT 0, deferred bigint DEFAULT 0, dead bigint DEFAULT 0
) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO rota.queue_terminal_count_deltas
  SELECT t.last_value % 4, of_slot, of_lane, waiting, running, completed, cancelled, failed, deferred, dead
  FROM rota.queue_delta_turn AS t, rota.queue_storage AS s WHERE s.counter_mode = 'ledger';
END $$;

-- The same for many lanes, each with its slot.
CREATE OR REPLACE FUNCTION rota.queue_count_each(
  slots integer[], lanes integer[], waiting bigint[] DEFAULT NULL, running bigint[] DEFAULT NULL,
  completed bigint[] DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO rota.queue_terminal_count_deltas
  SELECT t.last_value % 4, u.slot, u.lane, coalesce(u.waiting, 0), coalesce(u.running, 0), coalesce(u.completed, 0),
         0, 0, 0, 0
  FROM rota.queue_delta_turn AS t, rota.queue_storage AS s,
       unnest(slots, lanes, waiting, running, completed) AS u (slot, lane, waiting, running, completed)
  WHERE s.counter_mode = 'ledger';
END $$;

-- Writers of counts either wait for the lock, with their rows uncommitted and thus invisible here, or have committed
-- both. The tables are locked in the order of those writers.
CREATE OR REPLACE FUNCTION rota.queue_rebuild_counts(mode text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  PERFORM rota.queue_read_committed();
  LOCK TABLE rota.queue_terminal_count_deltas, rota.queue_storage, rota.queue_terminal_live_counts
    IN ACCESS EXCLUSIVE MODE;
  TRUNCATE rota.queue_terminal_count_deltas, rota.queue_terminal_live_counts;
  INSERT INTO rota.queue_terminal_live_counts
  SELECT s.lane_id, s.ready_slot, s.waiting, s.running, s.completed, s.cancelled, s.failed, s.deferred, s.dead
  FROM rota.queue_scan() AS s WHERE coalesce(mode, '') <> 'scan';
  UPDATE rota.queue_storage SET counters_trusted = coalesce(mode, counter_mode) <> 'scan',
    counter_mode = coalesce(mode, counter_mode);
END $$;

-- The counts of `queue_scan` for one slot, restricted to positions before (last_lane, upto).
CREATE OR REPLACE FUNCTION rota.queue_count_before(slot integer, last_lane integer, upto bigint) RETURNS rota.queue_slot_counts[]
LANGUAGE plpgsql AS $$
DECLARE
  counted rota.queue_slot_counts[];
BEGIN
  EXECUTE format($q$
    WITH far AS MATERIALIZED (
      SELECT c.lane_id, c.cursor FROM rota.queue_cursors(ARRAY(
        SELECT DISTINCT e.lane_id FROM rota.ready_entries_%1$s e WHERE (e.lane_id, e.lane_seq) < ($1, $2))) AS c
    ), found (lane_id, waiting, running, completed, cancelled) AS (
      SELECT e.lane_id, greatest(0, e.lane_seq + e.n - greatest(e.lane_seq, f.cursor)), 0, 0, 0
      FROM rota.ready_entries_%1$s e JOIN far f ON f.lane_id = e.lane_id WHERE (e.lane_id, e.lane_seq) < ($1, $2)
      UNION ALL
      SELECT t.lane_id, CASE WHEN t.first_seq >= f.cursor THEN -t.n ELSE 0 END, 0, 0, t.n
      FROM rota.ready_tombstones t JOIN far f ON f.lane_id = t.lane_id
      WHERE t.ready_slot = %1$s AND (t.lane_id, t.first_seq) < ($1, $2)
      UNION ALL
      SELECT r.lane_id, r.n, 0, 0, 0 FROM rota.queue_returned r
      WHERE r.ready_slot = %1$s AND (r.lane_id, r.first_seq) < ($1, $2)
      UNION ALL
      SELECT c.lane_id, 0, c.n, 0, 0 FROM rota.queue_claims_%1$s c WHERE (c.lane_id, c.last_seq) < ($1, $2)
      UNION ALL
      SELECT c.lane_id, 0, -x.n, CASE WHEN x.outcome = 1 THEN x.n ELSE 0 END,
             CASE WHEN x.outcome = 3 THEN x.n ELSE 0 END
      FROM rota.queue_closures_%1$s x JOIN rota.queue_claims_%1$s c ON c.claim_id = x.claim_id
      WHERE (c.lane_id, c.last_seq) < ($1, $2)
    )
    SELECT array_agg(s) FROM (
      SELECT ROW(f.lane_id, %1$s, sum(f.waiting), sum(f.running), sum(f.completed), sum(f.cancelled), 0, 0, 0
             )::rota.queue_slot_counts AS s FROM found f GROUP BY f.lane_id ORDER BY f.lane_id) AS s
  $q$, slot) INTO counted USING last_lane, upto;
  RETURN counted;
END $$;
