-- Folds deltas of closed delta partitions (turns) into the live counts. While an old snapshot would make updates pile
-- up dead rows, it only merges them into one delta per slot and lane, and only where the partition can be truncated:
-- deleted deltas would stay as dead rows and cost as much to read. Returns the outcome per turn with deltas.
CREATE OR REPLACE FUNCTION rota.queue_fold(pinned boolean)
RETURNS TABLE (turn integer, deltas bigint, done text)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  current integer := nextval('rota.queue_delta_turn') % 4;
  holds boolean;
  truncated boolean;
  moved text;
BEGIN
  LOCK TABLE ONLY rota.queue_terminal_count_deltas IN ROW EXCLUSIVE MODE;
  FOR turn IN SELECT t FROM generate_series(0, 3) AS t WHERE t <> current LOOP
    EXECUTE format('SELECT EXISTS (SELECT FROM rota.queue_terminal_count_deltas_%s)', turn) INTO holds;
    CONTINUE WHEN NOT holds;
    truncated := rota.queue_turn_lock(turn);
    IF truncated THEN
      moved := format('SELECT * FROM rota.queue_terminal_count_deltas_%s', turn);
    ELSIF pinned THEN
      deltas := 0;
      done := 'in use';
      RETURN NEXT;
      CONTINUE;
    ELSE
      -- A transaction from before the turn changed is still open. Rows that are visible can go nevertheless.
      moved := format('DELETE FROM rota.queue_terminal_count_deltas_%s RETURNING *', turn);
    END IF;
    EXECUTE 'WITH moved AS (' || moved || ') ' || rota.queue_fold_into(pinned) || ' SELECT count(*) FROM moved'
      INTO deltas USING current;
    IF truncated THEN
      EXECUTE format('TRUNCATE ONLY rota.queue_terminal_count_deltas_%s', turn);
    END IF;
    done := CASE WHEN pinned THEN 'compacted' WHEN truncated THEN 'folded' ELSE 'folded around a transaction' END;
    RETURN NEXT;
  END LOOP;
END $$;

-- Locks the deltas of a turn; false if a session keeps using them. Polls instead of waiting, because a waiter for such
-- a lock blocks everyone behind it.
CREATE OR REPLACE FUNCTION rota.queue_turn_lock(turn integer) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
  FOR attempt IN 1..10 LOOP
    BEGIN
      EXECUTE format('LOCK TABLE ONLY rota.queue_terminal_count_deltas_%s IN ACCESS EXCLUSIVE MODE NOWAIT', turn);
      RETURN true;
    EXCEPTION WHEN lock_not_available THEN
      PERFORM pg_sleep(0.002);
    END;
  END LOOP;
  RETURN false;
END $$;

CREATE OR REPLACE FUNCTION rota.queue_fold_into(pinned boolean) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
  SELECT ', summed AS (
    SELECT lane_id, ready_slot, sum(waiting) AS waiting, sum(running) AS running, sum(completed) AS completed,
           sum(cancelled) AS cancelled, sum(failed) AS failed, sum(deferred) AS deferred, sum(dead) AS dead
    FROM moved GROUP BY 1, 2 ORDER BY 1, 2
  ), put AS (' || CASE WHEN pinned THEN '
    INSERT INTO rota.queue_terminal_count_deltas
    SELECT $1, ready_slot, lane_id, waiting, running, completed, cancelled, failed, deferred, dead FROM summed'
  ELSE '
    INSERT INTO rota.queue_terminal_live_counts AS c
    SELECT lane_id, ready_slot, waiting, running, completed, cancelled, failed, deferred, dead FROM summed
    ON CONFLICT (lane_id, ready_slot) DO UPDATE SET
      waiting = c.waiting + excluded.waiting, running = c.running + excluded.running,
      completed = c.completed + excluded.completed, cancelled = c.cancelled + excluded.cancelled,
      failed = c.failed + excluded.failed, deferred = c.deferred + excluded.deferred, dead = c.dead + excluded.dead'
  END || ')'
$$;

-- Sessions that have kept old row versions alive for longer than `than`, oldest first.
CREATE OR REPLACE FUNCTION rota.queue_pins(than interval) RETURNS TABLE (pid integer, application text, age_s float8, state text)
LANGUAGE sql AS $$
  SELECT a.pid, a.application_name, extract(epoch FROM clock_timestamp() - a.xact_start)::float8, a.state
  FROM pg_stat_activity a
  WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
    AND (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL) AND a.xact_start < clock_timestamp() - than
  ORDER BY a.xact_start
$$;

-- Opens a new slot when the open one is full, or old and not empty, and the next one is empty.
CREATE OR REPLACE FUNCTION rota.queue_rotation_due(bytes_max bigint, age_max interval) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
  last rota.queue_ring_rotations;
  held bigint;
BEGIN
  SELECT * INTO last FROM rota.queue_ring_rotations ORDER BY generation DESC LIMIT 1;
  held := pg_relation_size(format('rota.ready_entries_%s', last.generation % 7)::regclass)
        + pg_relation_size(format('rota.queue_claims_%s', last.generation % 7)::regclass)
        + pg_relation_size(format('rota.queue_closures_%s', last.generation % 7)::regclass);
  RETURN held > 0 AND (held >= bytes_max OR last.rotated_at <= clock_timestamp() - age_max);
END $$;

CREATE OR REPLACE FUNCTION rota.queue_rotate(bytes_max bigint, age_max interval) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
  last bigint := rota.queue_generation();
  empty boolean;
BEGIN
  IF NOT rota.queue_rotation_due(bytes_max, age_max) THEN
    RETURN 'not needed';
  END IF;
  EXECUTE format('SELECT NOT EXISTS (SELECT FROM rota.ready_entries_%1$s)'
                 ' AND NOT EXISTS (SELECT FROM rota.queue_claims_%1$s)', (last + 1) % 7) INTO empty;
  IF NOT empty THEN
    RETURN 'full';
  END IF;
  INSERT INTO rota.queue_ring_rotations (generation) VALUES (last + 1);
  DELETE FROM rota.queue_ring_rotations r WHERE r.generation < last - 7;
  RETURN 'rotated';
END $$;

-- Whether the folded counters say that a slot has live positions. Checked first because it is cheap; only the rows
-- decide that a slot is done.
CREATE OR REPLACE FUNCTION rota.queue_slot_busy(slot integer) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
  IF NOT rota.queue_counters_hold() THEN
    RETURN false;
  END IF;
  RETURN (SELECT coalesce(sum(c.waiting) + sum(c.running), 0) > 0
          FROM rota.queue_terminal_live_counts c WHERE c.ready_slot = slot);
END $$;

-- Whether a slot has positions that have not ended, or must be kept: cancelled positions ahead of the lane's cursor
-- keep their place until everything before them, in older slots, was claimed. Running ones are checked first, which is
-- cheaper.
CREATE OR REPLACE FUNCTION rota.queue_slot_live(slot integer) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
  generation bigint := rota.queue_generation();
  live boolean;
BEGIN
  EXECUTE format('SELECT EXISTS (SELECT FROM rota.queue_returned WHERE ready_slot = %1$s)'
                 ' OR coalesce((SELECT sum(n) FROM rota.queue_claims_%1$s), 0)'
                 ' > coalesce((SELECT sum(n) FROM rota.queue_closures_%1$s), 0)', slot) INTO live;
  IF live THEN
    RETURN true;
  END IF;
  EXECUTE format($q$
    SELECT EXISTS (
      SELECT FROM (SELECT lane_id, min(lane_seq) AS first, max(lane_seq + n) AS next
                   FROM rota.ready_entries_%1$s GROUP BY 1) AS filled,
                  LATERAL rota.queue_cursor(filled.lane_id, $1) AS c
      WHERE c.cursor < filled.first OR filled.next - c.cursor > coalesce(
        (SELECT sum(t.n) FROM rota.ready_tombstones t
         WHERE t.lane_id = filled.lane_id AND t.ready_slot = %1$s AND t.first_seq >= c.cursor), 0))
  $q$, slot) INTO live USING generation;
  RETURN live;
END $$;

-- Sealed slots with rows that may all have ended, oldest first.
CREATE OR REPLACE FUNCTION rota.queue_prunable() RETURNS SETOF integer
LANGUAGE plpgsql AS $$
DECLARE
  generation bigint := rota.queue_generation();
  slot integer;
  holds boolean;
BEGIN
  FOR age IN REVERSE 6..1 LOOP
    slot := rota.queue_slot(generation, age);
    EXECUTE format('SELECT EXISTS (SELECT FROM rota.ready_entries_%1$s)'
                   ' OR EXISTS (SELECT FROM rota.queue_claims_%1$s)', slot) INTO holds;
    IF holds AND NOT rota.queue_slot_busy(slot) THEN
      RETURN NEXT slot;
    END IF;
  END LOOP;
END $$;

-- Truncates a sealed slot in which everything has ended. Checked before the lock, so as not to block anyone needlessly,
-- and after it, since rows may have been committed during the wait. The rollup is counted from the removed rows.
-- `by_rows`: ignore the folded counters, which are stale while a session pins old rows.
CREATE OR REPLACE FUNCTION rota.queue_prune(slot integer, lock_ms integer, by_rows boolean DEFAULT false) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
  holds boolean;
BEGIN
  PERFORM rota.queue_read_committed();
  EXECUTE format('SELECT EXISTS (SELECT FROM rota.ready_entries_%1$s)'
                 ' OR EXISTS (SELECT FROM rota.queue_claims_%1$s)', slot) INTO holds;
  IF NOT holds OR slot = rota.queue_generation() % 7 OR slot > 6 THEN
    RETURN 'not needed';
  END IF;
  IF NOT by_rows AND rota.queue_slot_busy(slot) OR rota.queue_slot_live(slot) THEN
    RETURN 'live';
  END IF;
  IF NOT rota.queue_slot_lock(slot, lock_ms) THEN
    RETURN 'blocked';
  END IF;
  IF rota.queue_slot_live(slot) THEN
    RETURN 'live';
  END IF;
  PERFORM rota.queue_slot_roll_up(slot);
  EXECUTE format($q$
    INSERT INTO rota.queue_lane_bases AS b
    SELECT lane_id, max(lane_seq + n), max(lane_seq + n) FROM rota.ready_entries_%s GROUP BY 1 ORDER BY 1
    ON CONFLICT (lane_id) DO UPDATE SET next_seq = greatest(b.next_seq, excluded.next_seq),
                                        cursor = greatest(b.cursor, excluded.cursor)
  $q$, slot);
  PERFORM rota.queue_slot_empty(slot);
  RETURN 'pruned';
END $$;

-- Locks the slot against all transactions. False if a session stays in one beyond the lock timeout. The tables are
-- locked in the order in which claims and ends use them; the reverse could deadlock.
CREATE OR REPLACE FUNCTION rota.queue_slot_lock(slot integer, lock_ms integer) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
  PERFORM set_config('lock_timeout', lock_ms::text, true);
  EXECUTE format('LOCK TABLE ONLY rota.queue_claims_%1$s, ONLY rota.queue_closures_%1$s, ONLY rota.ready_entries_%1$s'
                 ' IN ACCESS EXCLUSIVE MODE', slot);
  RETURN true;
EXCEPTION WHEN lock_not_available THEN
  RETURN false;
END $$;

CREATE OR REPLACE FUNCTION rota.queue_slot_roll_up(slot integer) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  EXECUTE format($q$
    SELECT rota.queue_roll_up(s.queue, s.priority, completed => s.completed, cancelled => s.cancelled)
    FROM (
      SELECT l.queue, l.priority, coalesce(sum(u.completed), 0)::bigint AS completed,
             coalesce(sum(u.cancelled), 0)::bigint AS cancelled
      FROM (
        SELECT c.lane_id, sum(x.n) FILTER (WHERE x.outcome = 1) AS completed,
               sum(x.n) FILTER (WHERE x.outcome = 3) AS cancelled
        FROM rota.queue_closures_%1$s x JOIN rota.queue_claims_%1$s c ON c.claim_id = x.claim_id GROUP BY 1
        UNION ALL
        SELECT t.lane_id, 0, sum(t.n) FROM rota.ready_tombstones t WHERE t.ready_slot = %1$s GROUP BY 1
      ) AS u JOIN rota.queue_lanes l ON l.lane_id = u.lane_id
      GROUP BY 1, 2 ORDER BY 1, 2
    ) AS s WHERE s.completed > 0 OR s.cancelled > 0
  $q$, slot);
END $$;

-- Removes rows and counters of a slot that was rolled up. Counts beyond the rows go too, so that a drift never outlives
-- its slot.
CREATE OR REPLACE FUNCTION rota.queue_slot_empty(slot integer) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  DELETE FROM rota.ready_tombstones t WHERE t.ready_slot = slot;
  INSERT INTO rota.queue_terminal_count_deltas
  SELECT t.last_value % 4, slot, d.lane_id, -sum(d.waiting), -sum(d.running), -sum(d.completed), -sum(d.cancelled),
         -sum(d.failed), -sum(d.deferred), -sum(d.dead)
  FROM rota.queue_terminal_count_deltas d, rota.queue_delta_turn t WHERE d.ready_slot = slot
  GROUP BY t.last_value, d.lane_id;
  DELETE FROM rota.queue_terminal_live_counts c WHERE c.ready_slot = slot;
  EXECUTE format('TRUNCATE ONLY rota.ready_entries_%1$s, ONLY rota.queue_claims_%1$s, ONLY rota.queue_closures_%1$s',
                 slot);
END $$;

-- The claim cursors of these lanes; unknown lanes are missing.
CREATE OR REPLACE FUNCTION rota.queue_cursors(lanes integer[]) RETURNS TABLE (lane_id integer, cursor bigint)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
BEGIN
  RETURN QUERY
    SELECT l, greatest(b.cursor, (SELECT c.last_seq + 1 FROM rota.queue_claims c WHERE c.lane_id = l
                                  ORDER BY c.last_seq DESC LIMIT 1), 0)
    FROM unnest(lanes) AS l LEFT JOIN rota.queue_lane_bases b ON b.lane_id = l;
END $$;

-- Deletes ended positions before (last_lane, upto) of a slot that stays in use: claims, their closures and passed
-- tombstones. They are rolled up and no longer counted in the slot. Needs no exclusive access.
CREATE OR REPLACE FUNCTION rota.queue_shed_ends(slot integer, last_lane integer, upto bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
  ended record;
BEGIN
  FOR ended IN
    WITH passed AS MATERIALIZED (
      SELECT c.lane_id, c.cursor FROM rota.queue_cursors(ARRAY(
        SELECT DISTINCT t.lane_id FROM rota.ready_tombstones t WHERE t.ready_slot = slot)) AS c
    ), gone AS (
      DELETE FROM rota.ready_tombstones t USING passed p
      WHERE t.ready_slot = slot AND (t.lane_id, t.first_seq) < (last_lane, upto)
        AND t.lane_id = p.lane_id AND t.first_seq < p.cursor RETURNING t.lane_id, t.n
    )
    SELECT l.lane_id, l.queue, l.priority, sum(g.n) AS n
    FROM gone g JOIN rota.queue_lanes l ON l.lane_id = g.lane_id GROUP BY 1, 2, 3 ORDER BY 2, 3, 1
  LOOP
    PERFORM rota.queue_count(slot, ended.lane_id, cancelled => -ended.n);
    PERFORM rota.queue_roll_up(ended.queue, ended.priority, cancelled => ended.n);
  END LOOP;

  FOR ended IN EXECUTE format($q$
    WITH over AS MATERIALIZED (
      SELECT c.claim_id FROM rota.queue_claims_%1$s c LEFT JOIN rota.queue_closures_%1$s x ON x.claim_id = c.claim_id
      WHERE (c.lane_id, c.last_seq) < ($1, $2) GROUP BY c.claim_id HAVING min(c.n) = coalesce(sum(x.n), 0)
    ), claims AS (
      DELETE FROM rota.queue_claims_%1$s c USING over o WHERE o.claim_id = c.claim_id
      RETURNING c.claim_id, c.lane_id, c.last_seq
    ), closures AS (
      DELETE FROM rota.queue_closures_%1$s x USING over o WHERE o.claim_id = x.claim_id
      RETURNING x.claim_id, x.outcome, x.n
    )
    SELECT l.lane_id, l.queue, l.priority, max(c.last_seq) + 1 AS next,
           coalesce(sum(x.n) FILTER (WHERE x.outcome = 1), 0) AS completed,
           coalesce(sum(x.n) FILTER (WHERE x.outcome = 3), 0) AS cancelled
    FROM claims c LEFT JOIN closures x ON x.claim_id = c.claim_id
    JOIN rota.queue_lanes l ON l.lane_id = c.lane_id GROUP BY 1, 2, 3 ORDER BY 2, 3, 1
  $q$, slot) USING last_lane, upto
  LOOP
    -- The claim that defined the cursor of the lane may be among the deleted ones.
    INSERT INTO rota.queue_lane_bases AS b VALUES (ended.lane_id, ended.next, ended.next)
    ON CONFLICT (lane_id) DO UPDATE SET next_seq = greatest(b.next_seq, excluded.next_seq),
                                        cursor = greatest(b.cursor, excluded.cursor);
    PERFORM rota.queue_count(slot, ended.lane_id, completed => -ended.completed, cancelled => -ended.cancelled);
    PERFORM rota.queue_roll_up(ended.queue, ended.priority, completed => ended.completed, cancelled => ended.cancelled);
  END LOOP;
END $$;

-- Deletes entries without references, of positions before (last_lane, upto). Needs no exclusive access, so cursors are
-- read first: a claim made after the read of the claims must not make its entry look passed. Returned ranges do not
-- overlap, and a claim has at most 512 positions, so few rows are read per entry.
CREATE OR REPLACE FUNCTION rota.queue_shed_entries(slot integer, last_lane integer, upto bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
  lanes integer[];
  cursors bigint[];
BEGIN
  EXECUTE format('SELECT array_agg(c.lane_id), array_agg(c.cursor) FROM rota.queue_cursors(ARRAY('
                 'SELECT DISTINCT e.lane_id FROM rota.ready_entries_%s e'
                 ' WHERE (e.lane_id, e.lane_seq) < ($1, $2))) AS c', slot) INTO lanes, cursors USING last_lane, upto;
  EXECUTE format($q$
    DELETE FROM rota.ready_entries_%1$s e USING unnest($1, $2) AS l (lane_id, cursor)
    WHERE l.lane_id = e.lane_id AND (e.lane_id, e.lane_seq) < ($3, $4)
      AND e.lane_seq < l.cursor AND e.lane_seq + e.n <= l.cursor
      AND e.lane_seq >= coalesce((
        SELECT r.first_seq + r.n FROM rota.queue_returned r
        WHERE r.lane_id = e.lane_id AND r.first_seq < e.lane_seq + e.n ORDER BY r.first_seq DESC LIMIT 1), 0)
      AND NOT EXISTS (
        SELECT FROM rota.queue_claims_%1$s c
        WHERE c.lane_id = e.lane_id AND c.last_seq BETWEEN e.lane_seq AND e.lane_seq + e.n + 510
          AND c.last_seq - c.n < e.lane_seq + e.n - 1)
  $q$, slot) USING lanes, cursors, last_lane, upto;
END $$;

-- Deletes ended rows of slot 7. In the oldest slot only ended claims go, which makes carrying over the rest short;
-- its entries go under the exclusive lock.
CREATE OR REPLACE FUNCTION rota.queue_shed(kept boolean) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  PERFORM rota.queue_read_committed();
  IF kept THEN
    PERFORM rota.queue_shed_ends(7, 2147483647, 0), rota.queue_shed_entries(7, 2147483647, 0);
  ELSE
    PERFORM rota.queue_shed_ends(((rota.queue_generation() + 1) % 7)::integer, 2147483647, 0);
  END IF;
END $$;

-- The next slot is needed and has live entries: move them to slot 7, where rows are deleted one by one as they end.
-- Each entry moves at most once. About `most` entries per call, since the slot is locked meanwhile; lowest lanes and
-- positions first, so that the rest of the slot is younger than what was moved.
CREATE OR REPLACE FUNCTION rota.queue_carry(lock_ms integer, most integer) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
  slot integer := (rota.queue_generation() + 1) % 7;
  edge record;
BEGIN
  PERFORM rota.queue_read_committed();
  IF NOT rota.queue_slot_lock(slot, lock_ms) THEN
    RETURN 'blocked';
  END IF;
  EXECUTE format('SELECT lane_id, lane_seq FROM rota.ready_entries_%s ORDER BY lane_id, lane_seq'
                 ' OFFSET $1 LIMIT 1', slot) INTO edge USING most;
  IF edge.lane_id IS NOT NULL THEN
    PERFORM rota.queue_carry_before(slot, edge.lane_id, rota.queue_carry_edge(slot, edge.lane_id, edge.lane_seq));
    RETURN 'carrying';
  END IF;
  PERFORM rota.queue_carry_before(slot, 2147483647, 0);
  PERFORM rota.queue_slot_empty(slot);
  RETURN 'carried';
END $$;

-- The first position from `seq` on where an entry begins and no claim is split.
CREATE OR REPLACE FUNCTION rota.queue_carry_edge(slot integer, of_lane integer, seq bigint) RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
  last bigint;
BEGIN
  LOOP
    EXECUTE format('SELECT max(last_seq) FROM rota.queue_claims_%s WHERE lane_id = $1'
                   ' AND last_seq BETWEEN $2 AND $2 + 510 AND last_seq - n + 1 < $2', slot)
      INTO last USING of_lane, seq;
    EXIT WHEN last IS NULL;
    EXECUTE format('SELECT lane_seq + n FROM rota.ready_entries_%s WHERE lane_id = $1 AND lane_seq <= $2'
                   ' ORDER BY lane_seq DESC LIMIT 1', slot) INTO seq USING of_lane, last;
  END LOOP;
  RETURN seq;
END $$;

-- Moves live entries of positions before (last_lane, upto), with their counts.
CREATE OR REPLACE FUNCTION rota.queue_carry_before(slot integer, last_lane integer, upto bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
  carried rota.queue_slot_counts[];
BEGIN
  WITH cut AS (
    UPDATE rota.queue_returned r SET n = upto - r.first_seq
    FROM rota.queue_returned was WHERE r.lane_id = last_lane AND r.ready_slot = slot AND r.first_seq < upto
      AND r.first_seq + r.n > upto AND was.lane_id = r.lane_id AND was.first_seq = r.first_seq
    RETURNING r.lane_id, was.first_seq + was.n - upto AS rest, r.parked_job, r.returned_at, r.turn_of
  ) INSERT INTO rota.queue_returned SELECT lane_id, upto, rest, slot, parked_job, returned_at, turn_of FROM cut;
  WITH cut AS (
    UPDATE rota.ready_tombstones t SET n = upto - t.first_seq
    FROM rota.ready_tombstones was WHERE t.lane_id = last_lane AND t.ready_slot = slot AND t.first_seq < upto
      AND t.first_seq + t.n > upto AND was.lane_id = t.lane_id AND was.first_seq = t.first_seq
    RETURNING t.lane_id, was.first_seq + was.n - upto AS rest
  ) INSERT INTO rota.ready_tombstones SELECT lane_id, upto, rest, slot FROM cut;

  PERFORM rota.queue_shed_ends(slot, last_lane, upto), rota.queue_shed_entries(slot, last_lane, upto);
  carried := rota.queue_count_before(slot, last_lane, upto);
  EXECUTE format($q$
    WITH gone AS (
      DELETE FROM rota.ready_entries_%1$s e WHERE (e.lane_id, e.lane_seq) < ($1, $2) RETURNING e.*
    ), put AS (
      INSERT INTO rota.ready_entries_7
      SELECT 7, lane_id, lane_seq, n, job_id, layer_id, frame, attempt, payload, enqueued_at FROM gone
    )
    INSERT INTO rota.queue_lane_bases AS b
    SELECT lane_id, max(lane_seq + n), 0 FROM gone GROUP BY 1 ORDER BY 1
    ON CONFLICT (lane_id) DO UPDATE SET next_seq = greatest(b.next_seq, excluded.next_seq)
  $q$, slot) USING last_lane, upto;
  EXECUTE format($q$
    WITH gone AS (
      DELETE FROM rota.queue_claims_%1$s c WHERE (c.lane_id, c.last_seq) < ($1, $2) RETURNING c.*
    ), put AS (
      INSERT INTO rota.queue_claims_7 SELECT 7, claim_id, lane_id, last_seq, n, owner, claimed_at FROM gone
    ), ended AS (
      DELETE FROM rota.queue_closures_%1$s x USING gone g WHERE g.claim_id = x.claim_id RETURNING x.*
    )
    INSERT INTO rota.queue_closures_7 SELECT 7, claim_id, outcome, n, bits, finalized_at FROM ended
  $q$, slot) USING last_lane, upto;
  UPDATE rota.queue_returned r SET ready_slot = 7
  WHERE r.ready_slot = slot AND (r.lane_id, r.first_seq) < (last_lane, upto);
  UPDATE rota.ready_tombstones t SET ready_slot = 7
  WHERE t.ready_slot = slot AND (t.lane_id, t.first_seq) < (last_lane, upto);
  PERFORM rota.queue_count(slot, c.lane_id, waiting => -c.waiting, running => -c.running, completed => -c.completed,
                           cancelled => -c.cancelled),
          rota.queue_count(7, c.lane_id, waiting => c.waiting, running => c.running, completed => c.completed,
                           cancelled => c.cancelled)
  FROM unnest(carried) AS c;
END $$;

-- Queues deferred frames that are due at the end of a lane. One whose lanes are all locked is skipped, so that it does
-- not block others.
CREATE OR REPLACE FUNCTION rota.queue_promote(most integer) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
  due record;
  lane integer;
  promoted bigint := 0;
  held integer[] := '{}';
  known integer;
BEGIN
  PERFORM rota.queue_read_committed();
  LOOP
    known := cardinality(held);
    FOR due IN
      SELECT l.queue, l.priority, array_agg(d.deferred_id) AS ids, array_agg(DISTINCT d.lane_id) AS lanes
      FROM (SELECT * FROM rota.deferred_jobs d WHERE d.run_at <= clock_timestamp() AND d.lane_id <> ALL (held)
            ORDER BY d.run_at LIMIT most) AS d
      JOIN rota.queue_lanes l ON l.lane_id = d.lane_id GROUP BY 1, 2 ORDER BY 1, 2
    LOOP
      lane := rota.queue_lane_to_fill(due.queue, due.priority, NULL, false);
      IF lane IS NULL THEN
        held := held || due.lanes;
      ELSE
        promoted := promoted + rota.queue_promote_to(lane, due.ids);
        PERFORM pg_notify('rota_queue', due.queue);
      END IF;
    END LOOP;
    EXIT WHEN promoted >= most OR cardinality(held) = known;
  END LOOP;
  RETURN promoted;
END $$;

-- Rows locked by a concurrent cancellation are skipped.
CREATE OR REPLACE FUNCTION rota.queue_promote_to(lane integer, ids bigint[]) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
  gone record;
  slot integer := rota.queue_open_slot();
  promoted bigint := 0;
BEGIN
  FOR gone IN EXECUTE format($q$
    WITH due AS (
      DELETE FROM rota.deferred_jobs d WHERE d.deferred_id = ANY (ARRAY(
        SELECT o.deferred_id FROM rota.deferred_jobs o WHERE o.deferred_id = ANY ($1) FOR UPDATE SKIP LOCKED))
      RETURNING d.*
    ), put AS (
      INSERT INTO rota.ready_entries_%1$s
      SELECT %1$s, $2, $3 + sum(d.n) OVER (ORDER BY d.run_at, d.deferred_id ROWS UNBOUNDED PRECEDING) - d.n, d.n,
             d.job_id, d.layer_id, d.frame, d.attempt, d.payload, now()
      FROM due d
    )
    SELECT d.lane_id, sum(d.n) AS n FROM due d GROUP BY 1 ORDER BY 1
  $q$, slot) USING ids, lane, rota.queue_next_seq(lane)
  LOOP
    PERFORM rota.queue_count(-1, gone.lane_id, deferred => -gone.n);
    promoted := promoted + gone.n;
  END LOOP;
  IF promoted > 0 THEN
    PERFORM rota.queue_count(slot, lane, waiting => promoted);
  END IF;
  RETURN promoted;
END $$;

-- Declares owners dead whose lease ended; the exclusive lock waits for a claim that is being made by them.
CREATE OR REPLACE FUNCTION rota.queue_bury_owners() RETURNS SETOF bigint
LANGUAGE plpgsql AS $$
DECLARE
  silent bigint;
BEGIN
  FOR silent IN
    SELECT o.owner FROM rota.queue_owners o
    WHERE NOT o.dead AND NOT EXISTS (
      SELECT FROM rota.lease l
      WHERE l.name = o.lease AND l.fence = o.owner AND l.expires_at > clock_timestamp()) ORDER BY 1
  LOOP
    PERFORM pg_advisory_xact_lock(1903519028, (silent & 2147483647)::integer);
    UPDATE rota.queue_owners o SET dead = true WHERE o.owner = silent;
  END LOOP;
  RETURN QUERY SELECT o.owner FROM rota.queue_owners o WHERE o.dead ORDER BY 1;
END $$;

-- Open positions of claims of this owner.
CREATE OR REPLACE FUNCTION rota.queue_open_claims(of_owner bigint) RETURNS TABLE (claim_id bigint, open varbit)
LANGUAGE sql AS $$
  SELECT c.claim_id, (rota.queue_mask(B'', c.n) | ~coalesce(bit_or(x.bits), rota.queue_mask(B'', c.n)))::varbit
  FROM rota.queue_claims c
  LEFT JOIN rota.queue_closures x ON x.ready_slot = c.ready_slot AND x.claim_id = c.claim_id
  WHERE c.owner = of_owner AND c.n > 0
  GROUP BY c.claim_id, c.n
  HAVING c.n > coalesce(sum(x.n), 0)
$$;
