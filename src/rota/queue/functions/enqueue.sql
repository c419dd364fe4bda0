-- Functions called for every batch are in PL/pgSQL, which caches their plans.
CREATE OR REPLACE FUNCTION rota.queue_generation() RETURNS bigint
LANGUAGE plpgsql AS $$
BEGIN
  RETURN (SELECT r.generation FROM rota.queue_ring_rotations r ORDER BY r.generation DESC LIMIT 1);
END $$;

-- Ages count back from the open slot; entries carried out of the ring are older than all of it.
CREATE OR REPLACE FUNCTION rota.queue_slot(generation bigint, age integer) RETURNS integer
LANGUAGE sql IMMUTABLE AS $$ SELECT CASE WHEN age = 7 THEN 7 ELSE ((generation - age) % 7)::integer END $$;

-- The row of the lane, created if it is new.
CREATE OR REPLACE FUNCTION rota.queue_lane(of_queue text, of_priority smallint, of_shard integer) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
  lane integer;
BEGIN
  SELECT l.lane_id INTO lane FROM rota.queue_lanes l
  WHERE l.queue = of_queue AND l.priority = of_priority AND l.enqueue_shard = of_shard;
  IF lane IS NULL THEN
    INSERT INTO rota.queue_lanes (queue, priority, enqueue_shard) VALUES (of_queue, of_priority, of_shard)
    ON CONFLICT DO NOTHING RETURNING lane_id INTO lane;
    IF lane IS NULL THEN
      SELECT l.lane_id INTO lane FROM rota.queue_lanes l
      WHERE l.queue = of_queue AND l.priority = of_priority AND l.enqueue_shard = of_shard;
    END IF;
  END IF;
  RETURN lane;
END $$;

-- Locks the end of a lane of the queue until the transaction ends: the first free shard, so that order is strict while
-- producers do not overlap. With `key` always the same shard. Null if all are locked and waiting is not allowed.
CREATE OR REPLACE FUNCTION rota.queue_lane_to_fill(of_queue text, of_priority smallint, key text, may_wait boolean) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
  shards integer;
  in_turns boolean;
  lane integer;
  held integer;
BEGIN
  SELECT q.enqueue_shards, q.by_job INTO shards, in_turns FROM rota.queues q WHERE q.queue = of_queue;
  IF NOT FOUND THEN
    INSERT INTO rota.queues (queue) VALUES (of_queue) ON CONFLICT DO NOTHING;
    SELECT q.enqueue_shards, q.by_job INTO shards, in_turns FROM rota.queues q WHERE q.queue = of_queue;
  END IF;
  IF key IS NOT NULL AND in_turns THEN
    UPDATE rota.queues q SET by_job = false WHERE q.queue = of_queue;
  END IF;
  IF key IS NULL THEN
    FOR shard IN 0 .. shards - 1 LOOP
      lane := rota.queue_lane(of_queue, of_priority, shard);
      IF pg_try_advisory_xact_lock(1903519025, lane) THEN
        RETURN lane;
      END IF;
      -- Spread waiters over the shards.
      held := CASE WHEN shard = pg_backend_pid() % shards THEN lane ELSE coalesce(held, lane) END;
    END LOOP;
  ELSE
    held := rota.queue_lane(of_queue, of_priority, ((hashtextextended(key, 0) & 2147483647) % shards)::integer);
    may_wait := may_wait OR pg_try_advisory_xact_lock(1903519025, held);
  END IF;
  IF NOT may_wait THEN
    RETURN NULL;
  END IF;
  PERFORM pg_advisory_xact_lock(1903519025, held);
  RETURN held;
END $$;

-- The number after the lane's last position. Exact while the end of the lane is locked. Slots are searched from the
-- newest on, and those without a position of the lane are unlocked again (a subtransaction releases its locks): a
-- producer in a long transaction must not keep every slot from being pruned. The bases are read last, since a prune
-- that was just missed has written them.
CREATE OR REPLACE FUNCTION rota.queue_next_seq(of_lane integer) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
  generation bigint := rota.queue_generation();
  found_seq bigint;
BEGIN
  FOR age IN 0..6 LOOP
    BEGIN
      found_seq := rota.queue_end(rota.queue_slot(generation, age), of_lane);
      IF found_seq IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'RT021';
      END IF;
      EXIT;
    EXCEPTION WHEN SQLSTATE 'RT021' THEN
      NULL;
    END;
  END LOOP;
  -- A slot between older ones may have been pruned, so the base may be ahead of the remaining rows.
  RETURN greatest(found_seq, (SELECT b.next_seq FROM rota.queue_lane_bases b WHERE b.lane_id = of_lane), 0);
END $$;

-- The same for many lanes. Slots without a position of any of them are unlocked again.
CREATE OR REPLACE FUNCTION rota.queue_next_seqs(lanes integer[]) RETURNS bigint[]
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
  generation bigint := rota.queue_generation();
  seqs bigint[];
  more bigint[];
BEGIN
  FOR age IN 0..6 LOOP
    BEGIN
      more := rota.queue_end_each(rota.queue_slot(generation, age), lanes, seqs);
      IF more IS NOT DISTINCT FROM coalesce(seqs, array_fill(NULL::bigint, ARRAY[cardinality(lanes)])) THEN
        RAISE EXCEPTION USING ERRCODE = 'RT021';
      END IF;
      seqs := more;
      EXIT WHEN array_position(seqs, NULL) IS NULL;
    EXCEPTION WHEN SQLSTATE 'RT021' THEN
      NULL;
    END;
  END LOOP;
  RETURN ARRAY(
    SELECT greatest(u.seq, (SELECT b.next_seq FROM rota.queue_lane_bases b WHERE b.lane_id = u.lane), 0)
    FROM unnest(lanes, seqs) WITH ORDINALITY AS u (lane, seq, place) ORDER BY u.place);
END $$;

-- The slot to write to, locked until the transaction ends: it may be sealed meanwhile, but not pruned.
CREATE OR REPLACE FUNCTION rota.queue_open_slot() RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
  generation bigint;
BEGIN
  LOOP
    generation := rota.queue_generation();
    CASE generation % 7
      WHEN 0 THEN LOCK TABLE ONLY rota.ready_entries_0 IN ROW EXCLUSIVE MODE;
      WHEN 1 THEN LOCK TABLE ONLY rota.ready_entries_1 IN ROW EXCLUSIVE MODE;
      WHEN 2 THEN LOCK TABLE ONLY rota.ready_entries_2 IN ROW EXCLUSIVE MODE;
      WHEN 3 THEN LOCK TABLE ONLY rota.ready_entries_3 IN ROW EXCLUSIVE MODE;
      WHEN 4 THEN LOCK TABLE ONLY rota.ready_entries_4 IN ROW EXCLUSIVE MODE;
      WHEN 5 THEN LOCK TABLE ONLY rota.ready_entries_5 IN ROW EXCLUSIVE MODE;
      WHEN 6 THEN LOCK TABLE ONLY rota.ready_entries_6 IN ROW EXCLUSIVE MODE;
    END CASE;
    EXIT WHEN generation = rota.queue_generation();
  END LOOP;
  RETURN generation % 7;
END $$;

-- Locks the end of a lane for each group, in their order: if a first shard is locked by another producer, the following
-- lanes are not locked before this one is.
CREATE OR REPLACE FUNCTION rota.queue_lanes_to_fill(queues text[], priorities smallint[], keys text[]) RETURNS integer[]
LANGUAGE plpgsql AS $$
DECLARE
  lanes integer[] := ARRAY(
    SELECT l.lane_id FROM unnest(queues, priorities, keys) WITH ORDINALITY AS g (queue, priority, key, place)
    LEFT JOIN rota.queue_lanes l
      ON l.queue = g.queue AND l.priority = g.priority AND l.enqueue_shard = 0 AND g.key IS NULL
    ORDER BY g.place);
BEGIN
  FOR at IN 1 .. cardinality(lanes) LOOP
    IF lanes[at] IS NULL OR NOT pg_try_advisory_xact_lock(1903519025, lanes[at]) THEN
      lanes[at] := rota.queue_lane_to_fill(queues[at], priorities[at], keys[at], true);
    END IF;
  END LOOP;
  RETURN lanes;
END $$;

-- Entries are sorted by group; `sizes` is the number of entries per group. Returns the first position of each group.
CREATE OR REPLACE FUNCTION rota.queue_enqueue(
  queues text[], priorities smallint[], keys text[], sizes integer[],
  jobs uuid[], layers uuid[], frames integer[], counts integer[], attempts smallint[], payloads bytea[], notify boolean
)
RETURNS TABLE (lane_id integer, first_seq bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  slot integer;
  lanes integer[];
  firsts bigint[];
  numbers bigint[];
  of_groups integer[];
BEGIN
  PERFORM rota.queue_read_committed();
  -- The slot is read after a possible wait for the last lane: newer positions of a lane are never in an older slot.
  IF cardinality(queues) = 1 THEN
    lane_id := rota.queue_lane_to_fill(queues[1], priorities[1], keys[1], true);
    first_seq := rota.queue_next_seq(lane_id);
    slot := rota.queue_open_slot();
    PERFORM rota.queue_count(slot, lane_id, waiting => rota.queue_append(
      slot, lane_id, first_seq, jobs, layers, frames, counts, attempts, payloads));
    RETURN NEXT;
  ELSE
    lanes := rota.queue_lanes_to_fill(queues, priorities, keys);
    firsts := rota.queue_next_seqs(lanes);
    slot := rota.queue_open_slot();
    of_groups := ARRAY(SELECT g.place FROM unnest(sizes) WITH ORDINALITY AS g (size, place), generate_series(1, g.size)
                       ORDER BY g.place);
    -- Groups with different keys may share a lane.
    SELECT array_agg(u.first ORDER BY u.place), array_agg(u.n ORDER BY u.place) INTO firsts, numbers
    FROM (
      SELECT g.place, g.n, firsts[g.place] - g.n
               + sum(g.n) OVER (PARTITION BY lanes[g.place] ORDER BY g.place ROWS UNBOUNDED PRECEDING) AS first
      FROM (SELECT e.place, sum(e.n)::bigint AS n FROM unnest(of_groups, counts) AS e (place, n) GROUP BY 1) AS g
    ) AS u;
    PERFORM rota.queue_append_each(slot, lanes, firsts, of_groups, jobs, layers, frames, counts, attempts, payloads);
    PERFORM rota.queue_count_each(array_fill(slot, ARRAY[cardinality(lanes)]), lanes, waiting => numbers);
    RETURN QUERY SELECT * FROM unnest(lanes, firsts);
  END IF;
  IF notify THEN
    PERFORM pg_notify('rota_queue', q) FROM (SELECT DISTINCT unnest(queues) AS q) AS told;
  END IF;
END $$;

COMMENT ON FUNCTION rota.queue_enqueue IS 'Append entries to lanes, in the caller''s transaction.';

-- The same for one entry of a queue without key. `first_lane` is the lane of its shard 0, null if it is not known.
CREATE OR REPLACE FUNCTION rota.queue_enqueue_one(
  of_queue text, of_priority smallint, first_lane integer,
  of_job uuid, of_layer uuid, of_frame integer, of_count integer, of_payload bytea
)
RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
  lane integer := first_lane;
  slot integer;
BEGIN
  IF current_setting('transaction_isolation') <> 'read committed' THEN
    PERFORM rota.queue_read_committed();
  END IF;
  IF lane IS NULL OR NOT pg_try_advisory_xact_lock(1903519025, lane) THEN
    lane := rota.queue_lane_to_fill(of_queue, of_priority, NULL, true);
  END IF;
  -- The slot is read after a possible wait for the lane: newer positions of a lane are never in an older slot.
  slot := rota.queue_open_slot();
  IF rota.queue_append_next(slot, lane, of_job, of_layer, of_frame, of_count, of_payload) IS NULL THEN
    PERFORM rota.queue_count(slot, lane, waiting => rota.queue_append(
      slot, lane, rota.queue_next_seq(lane), ARRAY[of_job], ARRAY[of_layer], ARRAY[of_frame], ARRAY[of_count],
      ARRAY[1::smallint], ARRAY[of_payload]));
  END IF;
  PERFORM pg_notify('rota_queue', of_queue);
END $$;

CREATE OR REPLACE FUNCTION rota.queue_defer(
  queues text[], priorities smallint[], run_ats timestamptz[],
  jobs uuid[], layers uuid[], frames integer[], counts integer[], attempts smallint[], payloads bytea[]
)
RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
  given record;
BEGIN
  PERFORM rota.queue_read_committed();
  INSERT INTO rota.queues (queue) SELECT DISTINCT unnest(queues) AS q ORDER BY q ON CONFLICT DO NOTHING;
  FOR given IN
    WITH put AS (
      INSERT INTO rota.deferred_jobs (run_at, lane_id, n, job_id, layer_id, frame, attempt, payload)
      SELECT e.run_at, rota.queue_lane(e.queue, e.priority, 0), e.n, e.job, e.layer, e.frame, e.attempt, e.payload
      FROM unnest(queues, priorities, run_ats, jobs, layers, frames, counts, attempts, payloads)
        AS e (queue, priority, run_at, job, layer, frame, n, attempt, payload)
      RETURNING lane_id, n
    ) SELECT lane_id, sum(n) AS n FROM put GROUP BY 1
  LOOP
    PERFORM rota.queue_count(-1, given.lane_id, deferred => given.n);
  END LOOP;
END $$;

-- Since when the position at the cursor of the lane has been waiting; null if there is none.
CREATE OR REPLACE FUNCTION rota.queue_cursor_since(of_lane integer, generation bigint) RETURNS timestamptz
LANGUAGE plpgsql AS $$
DECLARE
  at record;
  since timestamptz;
BEGIN
  SELECT rota.queue_past_tombstones(of_lane, c.cursor) AS seq, c.age INTO at FROM rota.queue_cursor(of_lane, generation) AS c;
  FOR age IN REVERSE at.age .. 0 LOOP
    since := rota.queue_since(rota.queue_slot(generation, age), of_lane, at.seq);
    EXIT WHEN since IS NOT NULL;
  END LOOP;
  RETURN since;
END $$;

-- The claim cursor of the lane, and the age of the oldest slot that may hold the next position; 7 is slot 7. Exact
-- while the lane is locked.
CREATE OR REPLACE FUNCTION rota.queue_cursor(of_lane integer, generation bigint, OUT cursor bigint, OUT age integer)
LANGUAGE plpgsql AS $$
BEGIN
  FOR at IN 0..7 LOOP
    cursor := rota.queue_claimed(rota.queue_slot(generation, at), of_lane);
    age := at;
    EXIT WHEN cursor IS NOT NULL;
  END LOOP;
  cursor := greatest(cursor, (SELECT b.cursor FROM rota.queue_lane_bases b WHERE b.lane_id = of_lane), 0);
END $$;

-- The same for many lanes; `age` is the largest of theirs.
CREATE OR REPLACE FUNCTION rota.queue_cursor_each(lanes integer[], generation bigint, OUT cursors bigint[], OUT age integer)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
BEGIN
  FOR at IN 0..7 LOOP
    cursors := rota.queue_claimed_each(rota.queue_slot(generation, at), lanes, cursors);
    age := at;
    EXIT WHEN array_position(cursors, NULL) IS NULL;
  END LOOP;
  cursors := ARRAY(
    SELECT greatest(u.cursor, (SELECT b.cursor FROM rota.queue_lane_bases b WHERE b.lane_id = u.lane), 0)
    FROM unnest(lanes, cursors) WITH ORDINALITY AS u (lane, cursor, place) ORDER BY u.place);
END $$;
