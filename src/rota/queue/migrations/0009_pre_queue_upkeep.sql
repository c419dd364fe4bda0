-- Where frames wait and end: counts, and what one leader does to keep the storage small. See docs/adr/0013-the-queue.md.

CREATE TYPE rota.queue_slot_counts AS (
  lane_id    integer,
  ready_slot integer,
  waiting    bigint,
  running    bigint,
  completed  bigint,
  cancelled  bigint,
  failed     bigint,
  deferred   bigint,
  dead       bigint
);

-- Counted from the rows themselves, by slot and lane. Slow; for the mode `scan`, for distrust and for rebuilding.
-- One statement, so that everything is from one snapshot.
CREATE FUNCTION rota.queue_scan(of_slot integer DEFAULT NULL) RETURNS SETOF rota.queue_slot_counts
LANGUAGE plpgsql AS $$
BEGIN
  RETURN QUERY EXECUTE format($q$
    WITH filled AS MATERIALIZED (
      SELECT l.lane_id, greatest(b.cursor, c.next, 0) AS cursor
      FROM rota.queue_lanes l
      LEFT JOIN rota.queue_lane_bases b ON b.lane_id = l.lane_id
      LEFT JOIN (SELECT lane_id, max(last_seq) + 1 AS next FROM rota.queue_claims GROUP BY 1) AS c
        ON c.lane_id = l.lane_id
    ), found (lane_id, slot, waiting, running, completed, cancelled, failed, deferred, dead) AS (
      SELECT e.lane_id, e.ready_slot::integer, sum(greatest(0, e.lane_seq + e.n - greatest(e.lane_seq, f.cursor))),
             0, 0, 0, 0, 0, 0
      FROM rota.ready_entries e JOIN filled f ON f.lane_id = e.lane_id WHERE e.ready_slot %1$s GROUP BY 1, 2
      UNION ALL
      SELECT t.lane_id, t.ready_slot, -sum(t.n) FILTER (WHERE t.first_seq >= f.cursor), 0, 0, sum(t.n), 0, 0, 0
      FROM rota.ready_tombstones t JOIN filled f ON f.lane_id = t.lane_id WHERE t.ready_slot %1$s GROUP BY 1, 2
      UNION ALL
      SELECT r.lane_id, r.ready_slot, sum(r.n), 0, 0, 0, 0, 0, 0
      FROM rota.queue_returned r WHERE r.ready_slot %1$s GROUP BY 1, 2
      UNION ALL
      SELECT c.lane_id, c.ready_slot, 0, sum(c.n), 0, 0, 0, 0, 0
      FROM rota.queue_claims c WHERE c.ready_slot %1$s GROUP BY 1, 2
      UNION ALL
      SELECT c.lane_id, c.ready_slot, 0, -sum(x.n), sum(x.n) FILTER (WHERE x.outcome = 1),
             sum(x.n) FILTER (WHERE x.outcome = 3), 0, 0, 0
      FROM rota.queue_closures x JOIN rota.queue_claims c ON c.ready_slot = x.ready_slot AND c.claim_id = x.claim_id
      WHERE x.ready_slot %1$s GROUP BY 1, 2
      UNION ALL
      SELECT d.lane_id, -1, 0, 0, 0, 0, count(*), 0, 0 FROM rota.done_entries d WHERE -1 %1$s GROUP BY 1
      UNION ALL
      SELECT d.lane_id, -1, 0, 0, 0, 0, 0, sum(d.n), 0 FROM rota.deferred_jobs d WHERE -1 %1$s GROUP BY 1
      UNION ALL
      SELECT d.lane_id, -1, 0, 0, 0, 0, 0, 0, count(*) FROM rota.dlq_entries d
      WHERE d.lane_id IS NOT NULL AND -1 %1$s GROUP BY 1
    )
    SELECT f.lane_id, f.slot, coalesce(sum(f.waiting), 0)::bigint, coalesce(sum(f.running), 0)::bigint,
           coalesce(sum(f.completed), 0)::bigint, coalesce(sum(f.cancelled), 0)::bigint,
           coalesce(sum(f.failed), 0)::bigint, coalesce(sum(f.deferred), 0)::bigint, coalesce(sum(f.dead), 0)::bigint
    FROM found f GROUP BY 1, 2
  $q$, CASE WHEN of_slot IS NULL THEN 'IS NOT NULL' ELSE '= ' || of_slot END);
END $$;

CREATE TYPE rota.queue_counted AS (
  queue     text,
  waiting   bigint,
  running   bigint,
  deferred  bigint,
  completed bigint,
  failed    bigint,
  cancelled bigint,
  dead      bigint
);

-- Whether counters may be believed; otherwise the rows are counted.
CREATE FUNCTION rota.queue_counters_hold() RETURNS boolean
LANGUAGE sql AS $$ SELECT s.counter_mode <> 'scan' AND s.counters_trusted FROM rota.queue_storage s $$;

-- Pruned ends are counted in; `queues` of null are all of them, and each has a row. Volatile, so that the snapshot is
-- taken after the locks: with an older one a fold that we waited for would be missing on both sides.
CREATE FUNCTION rota.queue_counts_exact(queues text[] DEFAULT NULL) RETURNS SETOF rota.queue_counted
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
  'Exact counts from the folded counters, the pending deltas and the rollups, in one statement.';

CREATE FUNCTION rota.queue_counts_scan(queues text[] DEFAULT NULL) RETURNS SETOF rota.queue_counted
LANGUAGE plpgsql AS $$
BEGIN
  PERFORM rota.queue_read_committed();
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

-- Without what was not folded yet: late by a fold interval, and cheaper by the pending deltas.
CREATE FUNCTION rota.queue_counts_fast(queues text[] DEFAULT NULL) RETURNS SETOF rota.queue_counted
LANGUAGE plpgsql AS $$
BEGIN
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

-- Lanes in which something waits that may be claimed; `parked` is part of `waiting`.
CREATE FUNCTION rota.queue_candidates(queues text[] DEFAULT NULL)
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
    WHERE (queues IS NULL OR q.queue = ANY (queues)) AND c.waiting > coalesce(p.parked, 0)
    ORDER BY l.priority DESC, l.lane_id;
END $$;

-- Since when the turn that would be claimed next has been waiting, for each lane that has one.
CREATE FUNCTION rota.queue_heads(lanes integer[]) RETURNS TABLE (lane_id integer, enqueued_at timestamptz)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  generation bigint := rota.queue_generation();
  at record;
  slots integer[];
BEGIN
  FOREACH lane_id IN ARRAY lanes LOOP
    SELECT r.first_seq AS seq, r.ready_slot AS slot INTO at FROM rota.queue_returned r
    WHERE r.lane_id = queue_heads.lane_id AND r.parked_job IS NULL ORDER BY r.first_seq LIMIT 1;
    IF FOUND THEN
      slots := ARRAY[at.slot];
    ELSE
      SELECT rota.queue_past_tombstones(queue_heads.lane_id, c.cursor) AS seq, c.age INTO at
      FROM rota.queue_cursor(queue_heads.lane_id, generation) AS c;
      slots := ARRAY(SELECT rota.queue_slot(generation, age) FROM generate_series(at.age, 0, -1) AS age);
    END IF;
    FOR place IN 1 .. cardinality(slots) LOOP
      EXECUTE format('SELECT e.enqueued_at FROM rota.ready_entries_%s e WHERE e.lane_id = $1 AND e.lane_seq <= $2'
                     ' AND e.lane_seq + e.n > $2 ORDER BY e.lane_seq DESC LIMIT 1', slots[place])
        INTO enqueued_at USING queue_heads.lane_id, at.seq;
      EXIT WHEN enqueued_at IS NOT NULL;
    END LOOP;
    IF enqueued_at IS NOT NULL THEN
      RETURN NEXT;
    END IF;
  END LOOP;
END $$;

-- Everybody who counts waits for the lock, with its rows uncommitted and thus unseen here, or has committed both. The
-- tables are locked in the order in which `queue_count` uses them.
CREATE FUNCTION rota.queue_rebuild_counts(mode text, stripes integer) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  PERFORM rota.queue_read_committed();
  LOCK TABLE rota.queue_storage, rota.queue_terminal_count_deltas, rota.queue_terminal_live_counts
    IN ACCESS EXCLUSIVE MODE;
  TRUNCATE rota.queue_terminal_count_deltas, rota.queue_terminal_live_counts;
  INSERT INTO rota.queue_terminal_live_counts
  SELECT s.lane_id, s.ready_slot, 0, s.waiting, s.running, s.completed, s.cancelled, s.failed, s.deferred, s.dead
  FROM rota.queue_scan() AS s WHERE coalesce(mode, '') <> 'scan';
  UPDATE rota.queue_storage SET counters_trusted = coalesce(mode, counter_mode) <> 'scan',
    counter_mode = coalesce(mode, counter_mode), counter_stripes = coalesce(stripes, counter_stripes);
END $$;

-- Deltas of turns that are no longer written to become part of the live counts, or, while a snapshot is so old that
-- updates would only pile up dead rows, one delta per slot and lane. Returns what was done per turn that held any.
CREATE FUNCTION rota.queue_fold(pinned boolean)
RETURNS TABLE (turn integer, deltas bigint, done text)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  current integer := nextval('rota.queue_delta_turn') % 4;
  holds boolean;
  truncated boolean;
  moved text;
BEGIN
  FOR turn IN SELECT t FROM generate_series(0, 3) AS t WHERE t <> current LOOP
    EXECUTE format('SELECT EXISTS (SELECT FROM rota.queue_terminal_count_deltas_%s)', turn) INTO holds;
    CONTINUE WHEN NOT holds;
    BEGIN
      EXECUTE format('LOCK TABLE ONLY rota.queue_terminal_count_deltas_%s IN ACCESS EXCLUSIVE MODE NOWAIT', turn);
      truncated := true;
    EXCEPTION WHEN lock_not_available THEN
      truncated := false;
    END;
    IF truncated THEN
      moved := format('SELECT * FROM rota.queue_terminal_count_deltas_%s', turn);
    ELSE
      -- Somebody has been in its transaction since before the turn changed. Rows that are there can go all the same.
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

CREATE FUNCTION rota.queue_fold_into(pinned boolean) RETURNS text
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
    SELECT lane_id, ready_slot, 0, waiting, running, completed, cancelled, failed, deferred, dead FROM summed
    ON CONFLICT (lane_id, ready_slot, stripe) DO UPDATE SET
      waiting = c.waiting + excluded.waiting, running = c.running + excluded.running,
      completed = c.completed + excluded.completed, cancelled = c.cancelled + excluded.cancelled,
      failed = c.failed + excluded.failed, deferred = c.deferred + excluded.deferred, dead = c.dead + excluded.dead'
  END || ')'
$$;

-- Who keeps old row versions alive, for longer than `than`: one row per session, the oldest first.
CREATE FUNCTION rota.queue_pins(than interval) RETURNS TABLE (pid integer, application text, age_s float8, state text)
LANGUAGE sql AS $$
  SELECT a.pid, a.application_name, extract(epoch FROM clock_timestamp() - a.xact_start)::float8, a.state
  FROM pg_stat_activity a
  WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
    AND (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL) AND a.xact_start < clock_timestamp() - than
  ORDER BY a.xact_start
$$;

-- A new slot, when the one in use holds enough or is old and holds anything, and the next one is empty.
CREATE FUNCTION rota.queue_rotate(bytes_max bigint, age_max interval) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
  last rota.queue_ring_rotations;
  held bigint;
  empty boolean;
BEGIN
  SELECT * INTO last FROM rota.queue_ring_rotations ORDER BY generation DESC LIMIT 1;
  held := pg_relation_size(format('rota.ready_entries_%s', last.generation % 7)::regclass)
        + pg_relation_size(format('rota.queue_claims_%s', last.generation % 7)::regclass)
        + pg_relation_size(format('rota.queue_closures_%s', last.generation % 7)::regclass);
  IF held = 0 OR (held < bytes_max AND last.rotated_at > clock_timestamp() - age_max) THEN
    RETURN 'not needed';
  END IF;
  EXECUTE format('SELECT NOT EXISTS (SELECT FROM rota.ready_entries_%1$s)'
                 ' AND NOT EXISTS (SELECT FROM rota.queue_claims_%1$s)', (last.generation + 1) % 7) INTO empty;
  IF NOT empty THEN
    RETURN 'full';
  END IF;
  INSERT INTO rota.queue_ring_rotations (generation) VALUES (last.generation + 1);
  DELETE FROM rota.queue_ring_rotations r WHERE r.generation < last.generation - 7;
  RETURN 'rotated';
END $$;

-- Whether the counters, as far as they are folded, say that a slot still has something to do. Asked first, since it
-- costs nothing; only the rows decide that a slot is done.
CREATE FUNCTION rota.queue_slot_busy(slot integer) RETURNS boolean
LANGUAGE sql AS $$
  SELECT rota.queue_counters_hold() AND coalesce(sum(c.waiting) + sum(c.running), 0) > 0
  FROM rota.queue_terminal_live_counts c WHERE c.ready_slot = slot
$$;

-- How many turns of a slot have not ended. `running` comes first, being the cheaper question.
CREATE FUNCTION rota.queue_slot_live(slot integer) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
  generation bigint := rota.queue_generation();
  live bigint;
BEGIN
  EXECUTE format('SELECT coalesce((SELECT sum(n) FROM rota.queue_claims_%1$s), 0)'
                 ' - coalesce((SELECT sum(n) FROM rota.queue_closures_%1$s), 0)'
                 ' + coalesce((SELECT sum(n) FROM rota.queue_returned WHERE ready_slot = %1$s), 0)', slot) INTO live;
  IF live > 0 THEN
    RETURN live;
  END IF;
  EXECUTE format($q$
    SELECT coalesce(sum(greatest(0, filled.next - greatest(filled.first, c.cursor)) - coalesce(
             (SELECT sum(t.n) FROM rota.ready_tombstones t
              WHERE t.lane_id = filled.lane_id AND t.ready_slot = %1$s AND t.first_seq >= c.cursor), 0)), 0)
    FROM (SELECT lane_id, min(lane_seq) AS first, max(lane_seq + n) AS next
          FROM rota.ready_entries_%1$s GROUP BY 1) AS filled,
         LATERAL rota.queue_cursor(filled.lane_id, $1) AS c
  $q$, slot) INTO live USING generation;
  RETURN live;
END $$;

-- Sealed slots that hold anything and may be done.
CREATE FUNCTION rota.queue_prunable() RETURNS SETOF integer
LANGUAGE plpgsql AS $$
DECLARE
  current integer := rota.queue_generation() % 7;
  holds boolean;
BEGIN
  FOR slot IN 0..6 LOOP
    CONTINUE WHEN slot = current;
    EXECUTE format('SELECT EXISTS (SELECT FROM rota.ready_entries_%1$s)'
                   ' OR EXISTS (SELECT FROM rota.queue_claims_%1$s)', slot) INTO holds;
    IF holds AND NOT rota.queue_slot_busy(slot) THEN
      RETURN NEXT slot;
    END IF;
  END LOOP;
END $$;

-- Forget a sealed slot in which everything has ended. Asked before the lock, so as not to stop anybody in vain, and
-- after it, since rows may have been committed while we waited. The rollup is counted from the rows that go.
CREATE FUNCTION rota.queue_prune(slot integer, lock_ms integer) RETURNS text
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
  IF rota.queue_slot_busy(slot) OR rota.queue_slot_live(slot) > 0 THEN
    RETURN 'live';
  END IF;
  IF NOT rota.queue_slot_lock(slot, lock_ms) THEN
    RETURN 'blocked';
  END IF;
  IF rota.queue_slot_live(slot) > 0 THEN
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

-- Nobody has an open transaction in the slot from here on. False if somebody stays in one for longer than we wait.
CREATE FUNCTION rota.queue_slot_lock(slot integer, lock_ms integer) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
  PERFORM set_config('lock_timeout', lock_ms::text, true);
  EXECUTE format('LOCK TABLE ONLY rota.ready_entries_%1$s, ONLY rota.queue_claims_%1$s, ONLY rota.queue_closures_%1$s'
                 ' IN ACCESS EXCLUSIVE MODE', slot);
  RETURN true;
EXCEPTION WHEN lock_not_available THEN
  RETURN false;
END $$;

CREATE FUNCTION rota.queue_slot_roll_up(slot integer) RETURNS void
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

-- Rows and counters of a slot that was rolled up, gone together. What the counters said beyond the rows goes too, so
-- that a drift never outlives its slot.
CREATE FUNCTION rota.queue_slot_empty(slot integer) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  DELETE FROM rota.ready_tombstones t WHERE t.ready_slot = slot;
  DELETE FROM rota.queue_terminal_live_counts c WHERE c.ready_slot = slot;
  INSERT INTO rota.queue_terminal_count_deltas
  SELECT t.last_value % 4, slot, d.lane_id, -sum(d.waiting), -sum(d.running), -sum(d.completed), -sum(d.cancelled),
         -sum(d.failed), -sum(d.deferred), -sum(d.dead)
  FROM rota.queue_terminal_count_deltas d, rota.queue_delta_turn t WHERE d.ready_slot = slot
  GROUP BY t.last_value, d.lane_id;
  EXECUTE format('TRUNCATE ONLY rota.ready_entries_%1$s, ONLY rota.queue_claims_%1$s, ONLY rota.queue_closures_%1$s',
                 slot);
END $$;

-- Forget what has ended in a slot that goes on living: its claims, their closures, the tombstones that were passed, and
-- entries nothing points to any more. It is rolled up and no longer counted in the slot.
CREATE FUNCTION rota.queue_slot_shed(slot integer) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
  ended record;
  generation bigint := rota.queue_generation();
BEGIN
  FOR ended IN
    WITH lanes AS MATERIALIZED (
      SELECT t.lane_id, (rota.queue_cursor(t.lane_id, generation)).cursor
      FROM (SELECT DISTINCT t.lane_id FROM rota.ready_tombstones t WHERE t.ready_slot = slot) AS t
    ), gone AS (
      DELETE FROM rota.ready_tombstones t USING lanes l
      WHERE t.ready_slot = slot AND t.lane_id = l.lane_id AND t.first_seq < l.cursor RETURNING t.lane_id, t.n
    )
    SELECT l.lane_id, l.queue, l.priority, sum(g.n)::integer AS n
    FROM gone g JOIN rota.queue_lanes l ON l.lane_id = g.lane_id GROUP BY 1, 2, 3 ORDER BY 2, 3, 1
  LOOP
    PERFORM rota.queue_count(slot, ended.lane_id, cancelled => -ended.n);
    PERFORM rota.queue_roll_up(ended.queue, ended.priority, cancelled => ended.n::bigint);
  END LOOP;

  FOR ended IN EXECUTE format($q$
    WITH over AS MATERIALIZED (
      SELECT c.claim_id FROM rota.queue_claims_%1$s c LEFT JOIN rota.queue_closures_%1$s x ON x.claim_id = c.claim_id
      GROUP BY c.claim_id HAVING min(c.n) = coalesce(sum(x.n), 0)
    ), claims AS (
      DELETE FROM rota.queue_claims_%1$s c USING over o WHERE o.claim_id = c.claim_id
      RETURNING c.claim_id, c.lane_id, c.last_seq
    ), closures AS (
      DELETE FROM rota.queue_closures_%1$s x USING over o WHERE o.claim_id = x.claim_id
      RETURNING x.claim_id, x.outcome, x.n
    )
    SELECT l.lane_id, l.queue, l.priority, max(c.last_seq) + 1 AS next,
           coalesce(sum(x.n) FILTER (WHERE x.outcome = 1), 0)::integer AS completed,
           coalesce(sum(x.n) FILTER (WHERE x.outcome = 3), 0)::integer AS cancelled
    FROM claims c LEFT JOIN closures x ON x.claim_id = c.claim_id
    JOIN rota.queue_lanes l ON l.lane_id = c.lane_id GROUP BY 1, 2, 3 ORDER BY 2, 3, 1
  $q$, slot)
  LOOP
    -- The claim that showed how far the lane had come may be among those that went.
    INSERT INTO rota.queue_lane_bases AS b VALUES (ended.lane_id, ended.next, ended.next)
    ON CONFLICT (lane_id) DO UPDATE SET next_seq = greatest(b.next_seq, excluded.next_seq),
                                        cursor = greatest(b.cursor, excluded.cursor);
    PERFORM rota.queue_count(slot, ended.lane_id, completed => -ended.completed, cancelled => -ended.cancelled);
    PERFORM rota.queue_roll_up(ended.queue, ended.priority, completed => ended.completed::bigint,
                               cancelled => ended.cancelled::bigint);
  END LOOP;
  -- Returned ranges do not overlap, and a claim is 512 turns at most: so few are looked at for each entry.
  EXECUTE format($q$
    WITH lanes AS MATERIALIZED (
      SELECT e.lane_id, (rota.queue_cursor(e.lane_id, $1)).cursor
      FROM (SELECT DISTINCT e.lane_id FROM rota.ready_entries_%1$s e) AS e
    )
    DELETE FROM rota.ready_entries_%1$s e USING lanes l
    WHERE l.lane_id = e.lane_id AND e.lane_seq + e.n <= l.cursor
      AND e.lane_seq >= coalesce((
        SELECT r.first_seq + r.n FROM rota.queue_returned r
        WHERE r.lane_id = e.lane_id AND r.first_seq < e.lane_seq + e.n ORDER BY r.first_seq DESC LIMIT 1), 0)
      AND NOT EXISTS (
        SELECT FROM rota.queue_claims_%1$s c
        WHERE c.lane_id = e.lane_id AND c.last_seq BETWEEN e.lane_seq AND e.lane_seq + e.n + 510
          AND c.last_seq - c.n < e.lane_seq + e.n - 1)
  $q$, slot) USING generation;
END $$;

-- The next slot is needed and something in it lives on: move that to slot 7, where rows are deleted one by one as they
-- end, and empty the slot. Once, however long it lives. Not if more than `most` entries would have to move.
CREATE FUNCTION rota.queue_carry(lock_ms integer, most integer) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
  slot integer := (rota.queue_generation() + 1) % 7;
  number bigint;
  carried rota.queue_slot_counts[];
BEGIN
  PERFORM rota.queue_read_committed();
  IF NOT rota.queue_slot_lock(slot, lock_ms) THEN
    RETURN 'blocked';
  END IF;
  PERFORM rota.queue_slot_shed(slot);
  EXECUTE format('SELECT count(*) FROM rota.ready_entries_%s', slot) INTO number;
  IF number > most THEN
    RETURN 'too much';
  END IF;
  carried := ARRAY(SELECT c FROM rota.queue_scan(slot) AS c);
  EXECUTE format($q$
    INSERT INTO rota.queue_lane_bases AS b
    SELECT e.lane_id, e.next, (rota.queue_cursor(e.lane_id, $1)).cursor
    FROM (SELECT e.lane_id, max(e.lane_seq + e.n) AS next FROM rota.ready_entries_%1$s e GROUP BY 1) AS e ORDER BY 1
    ON CONFLICT (lane_id) DO UPDATE SET next_seq = greatest(b.next_seq, excluded.next_seq),
                                        cursor = greatest(b.cursor, excluded.cursor)
  $q$, slot) USING rota.queue_generation();
  EXECUTE format('INSERT INTO rota.ready_entries_7 SELECT 7, lane_id, lane_seq, n, job_id, layer_id, frame, attempt,'
                 ' payload, enqueued_at FROM rota.ready_entries_%s', slot);
  EXECUTE format('INSERT INTO rota.queue_claims_7 SELECT 7, claim_id, lane_id, last_seq, n, owner, claimed_at'
                 ' FROM rota.queue_claims_%s', slot);
  EXECUTE format('INSERT INTO rota.queue_closures_7 SELECT 7, claim_id, outcome, n, bits, finalized_at'
                 ' FROM rota.queue_closures_%s', slot);
  UPDATE rota.queue_returned SET ready_slot = 7 WHERE ready_slot = slot;
  UPDATE rota.ready_tombstones SET ready_slot = 7 WHERE ready_slot = slot;
  PERFORM rota.queue_slot_empty(slot);
  PERFORM rota.queue_count(7, c.lane_id, waiting => c.waiting::integer, running => c.running::integer,
                           completed => c.completed::integer, cancelled => c.cancelled::integer)
  FROM unnest(carried) AS c;
  RETURN 'carried';
END $$;

-- Deferred frames whose time has come, to the end of a lane of their queue. One whose lanes are all held stays.
CREATE FUNCTION rota.queue_promote(most integer) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
  due record;
  lane integer;
  promoted integer := 0;
BEGIN
  PERFORM rota.queue_read_committed();
  FOR due IN
    SELECT l.queue, l.priority, array_agg(d.deferred_id) AS ids
    FROM (SELECT * FROM rota.deferred_jobs d WHERE d.run_at <= clock_timestamp()
          ORDER BY d.run_at LIMIT most) AS d
    JOIN rota.queue_lanes l ON l.lane_id = d.lane_id GROUP BY 1, 2 ORDER BY 1, 2
  LOOP
    lane := rota.queue_lane_to_fill(due.queue, due.priority, NULL, false);
    CONTINUE WHEN lane IS NULL;
    promoted := promoted + rota.queue_promote_to(lane, due.ids);
    PERFORM pg_notify('rota_queue', due.queue);
  END LOOP;
  RETURN promoted;
END $$;

CREATE FUNCTION rota.queue_promote_to(lane integer, ids bigint[]) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
  gone record;
  slot integer := rota.queue_open_slot();
  promoted integer := 0;
BEGIN
  FOR gone IN EXECUTE format($q$
    WITH due AS (
      DELETE FROM rota.deferred_jobs d WHERE d.deferred_id = ANY ($1) RETURNING d.*
    ), put AS (
      INSERT INTO rota.ready_entries_%1$s
      SELECT %1$s, $2, $3 + sum(d.n) OVER (ORDER BY d.run_at, d.deferred_id ROWS UNBOUNDED PRECEDING) - d.n, d.n,
             d.job_id, d.layer_id, d.frame, d.attempt, d.payload, now()
      FROM due d
    )
    SELECT d.lane_id, sum(d.n)::integer AS n FROM due d GROUP BY 1 ORDER BY 1
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

-- Owners whose lease ended are declared dead; the exclusive lock waits for a claim that is being made in their name.
CREATE FUNCTION rota.queue_bury_owners() RETURNS SETOF bigint
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

-- Open turns of claims that this owner made.
CREATE FUNCTION rota.queue_open_claims(of_owner bigint) RETURNS TABLE (claim_id bigint, open varbit)
LANGUAGE sql AS $$
  SELECT c.claim_id, (rota.queue_mask(B'', c.n) | ~coalesce(bit_or(x.bits), rota.queue_mask(B'', c.n)))::varbit
  FROM rota.queue_claims c
  LEFT JOIN rota.queue_closures x ON x.ready_slot = c.ready_slot AND x.claim_id = c.claim_id
  WHERE c.owner = of_owner AND c.n > 0
  GROUP BY c.claim_id, c.n
  HAVING c.n > coalesce(sum(x.n), 0)
$$;
