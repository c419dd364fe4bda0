-- Ended positions, one by one, with the body of their entry.
CREATE OR REPLACE FUNCTION rota.queue_turns(ended rota.queue_closed[])
RETURNS TABLE (
  token bigint, ready_slot integer, lane_id integer, lane_seq bigint, entry_seq bigint,
  job_id uuid, layer_id uuid, frame integer, attempt smallint, payload bytea
)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
#variable_conflict use_column
DECLARE
  slots integer[] := ARRAY(SELECT DISTINCT e.ready_slot FROM unnest(ended) AS e ORDER BY 1);
BEGIN
  FOREACH ready_slot IN ARRAY slots LOOP
    RETURN QUERY EXECUTE format($q$
      SELECT t.claim_id * 512 + t.place, %1$s, t.lane_id, t.first_seq + t.place, e.lane_seq,
             e.job_id, e.layer_id, (e.frame + t.first_seq + t.place - e.lane_seq)::integer, e.attempt, e.payload
      FROM (SELECT c.claim_id, c.lane_id, c.first_seq, i AS place, c.closed
            FROM unnest($1) AS c, generate_series(0, length(c.closed) - 1) AS i
            WHERE c.ready_slot = %1$s AND get_bit(c.closed, i) = 1) AS t
      CROSS JOIN LATERAL (
        SELECT * FROM rota.ready_entries_%1$s b
        WHERE b.lane_id = t.lane_id AND b.lane_seq <= t.first_seq + t.place ORDER BY b.lane_seq DESC LIMIT 1) AS e
    $q$, ready_slot) USING ended;
  END LOOP;
END $$;

-- Gives positions back without using an attempt. With `park_for` they wait until that job is unparked.
CREATE OR REPLACE FUNCTION rota.queue_give_back(ids bigint[], masks varbit[], park_for uuid)
RETURNS TABLE (claim_id bigint, refused varbit)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  ended rota.queue_closed[] := rota.queue_close(5, ids, masks);
BEGIN
  INSERT INTO rota.queue_returned (lane_id, first_seq, n, ready_slot, parked_job)
  SELECT back.lane_id, lower(back.run), upper(back.run) - lower(back.run), back.ready_slot, park_for
  FROM (SELECT e.lane_id, e.ready_slot, unnest(range_agg(int8range(e.first_seq + i, e.first_seq + i + 1))) AS run
        FROM unnest(ended) AS e, generate_series(0, length(e.closed) - 1) AS i
        WHERE get_bit(e.closed, i) = 1 GROUP BY 1, 2) AS back;
  PERFORM rota.queue_count(d.ready_slot, d.lane_id, running => -d.n, waiting => d.n)
  FROM (SELECT e.lane_id, e.ready_slot, sum(bit_count(e.closed))::bigint AS n
        FROM unnest(ended) AS e GROUP BY 1, 2 ORDER BY 1, 2) AS d
  WHERE d.n > 0;
  RETURN QUERY SELECT * FROM rota.queue_refused(ids, masks, ended);
END $$;

-- The job's positions right behind the cursor of a locked lane become one returned row per contiguous range, across any
-- number of entries, and the cursor moves on. Returns the number of positions that it moved past. Only index lookups, as
-- in `queue_read_k`.
CREATE OR REPLACE FUNCTION rota.queue_put_aside(of_lane integer, of_job uuid, parked_for uuid, turn_of uuid) RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
  generation bigint := rota.queue_generation();
  at record;
  entry record;
  slot integer;
  next bigint;
  passed bigint := 0;
BEGIN
  SELECT * INTO at FROM rota.queue_cursor(of_lane, generation);
  FOR age IN REVERSE at.age .. 0 LOOP
    slot := rota.queue_slot(generation, age);
    LOOP
      at.cursor := rota.queue_past_tombstones(of_lane, at.cursor);
      EXECUTE format('SELECT job_id, lane_seq + n AS next FROM rota.ready_entries_%s WHERE lane_id = $1'
                     ' AND lane_seq <= $2 ORDER BY lane_seq DESC LIMIT 1', slot) INTO entry USING of_lane, at.cursor;
      EXIT WHEN entry.next IS NULL OR entry.next <= at.cursor;
      IF entry.job_id <> of_job THEN
        RETURN passed;
      END IF;
      EXECUTE format($q$
        SELECT coalesce(
          (SELECT lane_seq FROM rota.ready_entries_%1$s WHERE lane_id = $1 AND lane_seq > $2 AND job_id <> $3
           ORDER BY lane_id, lane_seq LIMIT 1),
          (SELECT lane_seq + n FROM rota.ready_entries_%1$s WHERE lane_id = $1 ORDER BY lane_seq DESC LIMIT 1))
      $q$, slot) INTO next USING of_lane, at.cursor, of_job;
      INSERT INTO rota.queue_returned (lane_id, first_seq, n, ready_slot, parked_job, returned_at, turn_of)
      SELECT of_lane, lower(run), upper(run) - lower(run), slot, parked_for, clock_timestamp(), queue_put_aside.turn_of
      FROM unnest(int8multirange(int8range(at.cursor, next)) - coalesce(
        (SELECT range_agg(int8range(t.first_seq, t.first_seq + t.n)) FROM rota.ready_tombstones t
         WHERE t.lane_id = of_lane AND t.first_seq BETWEEN at.cursor AND next - 1), '{}')) AS run;
      INSERT INTO rota.queue_claims (ready_slot, claim_id, lane_id, last_seq, n, owner)
      VALUES (slot, nextval('rota.queue_claim_ids') * 8 + slot, of_lane, next - 1, 0, 0);
      passed := passed + next - at.cursor;
      at.cursor := next;
    END LOOP;
  END LOOP;
  RETURN passed;
END $$;

-- Locks the slots of what was put aside for the job, and returns them. A row of `queue_returned` is locked only while its
-- slot is: carrying over locks the slot first, so it never waits for a row.
CREATE OR REPLACE FUNCTION rota.queue_lock_slots_aside(of_lane integer, of_job uuid) RETURNS integer[]
LANGUAGE plpgsql AS $$
DECLARE
  slots integer[] := ARRAY(
    SELECT DISTINCT r.ready_slot FROM rota.queue_returned r
    WHERE r.lane_id = of_lane AND r.parked_job IS NULL AND r.turn_of = of_job ORDER BY 1);
  slot integer;
BEGIN
  FOREACH slot IN ARRAY slots LOOP
    EXECUTE format('LOCK TABLE ONLY rota.ready_entries_%s IN ACCESS SHARE MODE', slot);
  END LOOP;
  RETURN slots || 7;  -- or they were carried there meanwhile
END $$;

-- Parks the job's next positions, at the cursor or put aside, so that the lane moves on to other jobs.
CREATE OR REPLACE FUNCTION rota.queue_park_rest(of_lane integer, of_job uuid) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
  slots integer[];
BEGIN
  PERFORM rota.queue_read_committed();
  PERFORM pg_advisory_xact_lock(1903519026, of_lane);
  slots := rota.queue_lock_slots_aside(of_lane, of_job);
  UPDATE rota.queue_returned r SET parked_job = of_job, turn_of = NULL
  WHERE r.lane_id = of_lane AND r.turn_of = of_job AND r.parked_job IS NULL AND r.ready_slot = ANY (slots);
  RETURN rota.queue_put_aside(of_lane, of_job, of_job, NULL);
END $$;

COMMENT ON FUNCTION rota.queue_park_rest IS
  'Parked positions stay counted as waiting. Returns the number of positions that the cursor moved past.';

-- Makes up to `most` parked positions of a job claimable again, ahead of their lanes. The rest stays parked.
CREATE OR REPLACE FUNCTION rota.queue_unpark(of_job uuid, most bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
  parked rota.queue_returned;
  freed bigint := 0;
  part integer;
  lanes integer[] := ARRAY(SELECT DISTINCT r.lane_id FROM rota.queue_returned r WHERE r.parked_job = of_job ORDER BY 1);
BEGIN
  PERFORM rota.queue_read_committed();
  PERFORM pg_advisory_xact_lock(1903519026, lane) FROM unnest(lanes) AS lane;
  -- Rows are locked, because carrying over moves and splits them without the lock of their lane. Parts split off
  -- concurrently are not visible here and stay parked.
  FOR parked IN
    SELECT * FROM rota.queue_returned r WHERE r.parked_job = of_job AND r.lane_id = ANY (lanes)
    ORDER BY r.lane_id, r.first_seq FOR UPDATE
  LOOP
    EXIT WHEN freed >= most;
    part := least(parked.n, most - freed);
    UPDATE rota.queue_returned r SET parked_job = NULL, n = part
    WHERE r.lane_id = parked.lane_id AND r.first_seq = parked.first_seq;
    IF part < parked.n THEN
      INSERT INTO rota.queue_returned
      VALUES (parked.lane_id, parked.first_seq + part, parked.n - part, parked.ready_slot, of_job, parked.returned_at);
    END IF;
    freed := freed + part;
  END LOOP;
  PERFORM pg_notify('rota_queue', l.queue) FROM rota.queue_lanes l WHERE l.lane_id = ANY (lanes) AND freed > 0;
  RETURN freed;
END $$;

CREATE OR REPLACE FUNCTION rota.queue_cancel_running(ids bigint[], masks varbit[])
RETURNS TABLE (claim_id bigint, refused varbit)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  ended rota.queue_closed[] := rota.queue_close(3, ids, masks);
BEGIN
  PERFORM rota.queue_count(d.ready_slot, d.lane_id, running => -d.n, cancelled => d.n)
  FROM (SELECT e.lane_id, e.ready_slot, sum(bit_count(e.closed))::bigint AS n
        FROM unnest(ended) AS e GROUP BY 1, 2 ORDER BY 1, 2) AS d
  WHERE d.n > 0;
  RETURN QUERY SELECT * FROM rota.queue_refused(ids, masks, ended);
END $$;

-- The frames wait for `delay`, then at the end of their lane; `used`: an attempt was used. Frames of one range that end
-- together stay one range.
CREATE OR REPLACE FUNCTION rota.queue_retry(ids bigint[], masks varbit[], delay interval, used boolean)
RETURNS TABLE (claim_id bigint, refused varbit)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  ended rota.queue_closed[] := rota.queue_close(4, ids, masks);
BEGIN
  INSERT INTO rota.deferred_jobs (run_at, lane_id, n, job_id, layer_id, frame, attempt, payload)
  SELECT clock_timestamp() + delay, t.lane_id, count(*), t.job_id, t.layer_id, min(t.frame),
         least(t.attempt + used::integer, 32767), t.payload
  FROM (SELECT *, t.lane_seq - row_number() OVER (PARTITION BY t.lane_id, t.entry_seq ORDER BY t.lane_seq) AS island
        FROM rota.queue_turns(ended) AS t) AS t
  GROUP BY t.lane_id, t.entry_seq, t.island, t.job_id, t.layer_id, t.attempt, t.payload
  ORDER BY t.lane_id, min(t.lane_seq);
  PERFORM rota.queue_count(d.ready_slot, d.lane_id, running => -d.n),
          rota.queue_count(-1, d.lane_id, deferred => d.n)
  FROM (SELECT e.lane_id, e.ready_slot, sum(bit_count(e.closed))::bigint AS n
        FROM unnest(ended) AS e GROUP BY 1, 2 ORDER BY 1, 2) AS d
  WHERE d.n > 0;
  RETURN QUERY SELECT * FROM rota.queue_refused(ids, masks, ended);
END $$;

-- `tokens`, `reasons` and `errors` are parallel; each position of the masks has one. A queue may be set to move its
-- failures to the dead letters immediately.
CREATE OR REPLACE FUNCTION rota.queue_fail(ids bigint[], masks varbit[], tokens bigint[], reasons text[], errors text[])
RETURNS TABLE (claim_id bigint, refused varbit)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  ended rota.queue_closed[] := rota.queue_close(2, ids, masks);
  buried integer[] := ARRAY(SELECT DISTINCT l.lane_id FROM unnest(ended) AS e
                            JOIN rota.queue_lanes l ON l.lane_id = e.lane_id JOIN rota.queues q ON q.queue = l.queue
                            WHERE q.dlq_on_fail);
BEGIN
  WITH failed AS MATERIALIZED (
    SELECT t.*, why.reason, why.error FROM rota.queue_turns(ended) AS t
    JOIN unnest(tokens, reasons, errors) AS why (token, reason, error) ON why.token = t.token
  ), kept AS (
    INSERT INTO rota.done_entries (token, lane_id, job_id, layer_id, frame, attempt, payload, reason, error)
    SELECT f.token, f.lane_id, f.job_id, f.layer_id, f.frame, f.attempt, f.payload, f.reason, f.error
    FROM failed f WHERE f.lane_id <> ALL (buried)
  )
  INSERT INTO rota.dlq_entries (kind, reason, cause, lane_id, queue, job_id, layer_id, frame, attempt, payload, error)
  SELECT 'frame', f.reason, 'token:' || f.token, f.lane_id, l.queue, f.job_id, f.layer_id, f.frame, f.attempt,
         f.payload, f.error
  FROM failed f JOIN rota.queue_lanes l ON l.lane_id = f.lane_id WHERE f.lane_id = ANY (buried);
  PERFORM rota.queue_count(d.ready_slot, d.lane_id, running => -d.n),
          rota.queue_count(-1, d.lane_id, failed => CASE WHEN d.lane_id = ANY (buried) THEN 0 ELSE d.n END,
                           dead => CASE WHEN d.lane_id = ANY (buried) THEN d.n ELSE 0 END)
  FROM (SELECT e.lane_id, e.ready_slot, sum(bit_count(e.closed))::bigint AS n
        FROM unnest(ended) AS e GROUP BY 1, 2 ORDER BY 1, 2) AS d
  WHERE d.n > 0;
  RETURN QUERY SELECT * FROM rota.queue_refused(ids, masks, ended);
END $$;

-- Positions of a job that wait in lanes or were returned, between two frames. Tombstones keep their place and count,
-- and none spans the cursor. Deferred frames come first: one that is being promoted is in a lane afterwards.
CREATE OR REPLACE FUNCTION rota.queue_cancel_waiting(of_job uuid, of_layer uuid, first_frame integer, last_frame integer)
RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
  lane integer;
  cursor bigint;
  entry record;
  asked int8multirange;
  ahead int8multirange;
  behind int8multirange;
  returned rota.queue_returned;
  number bigint;
  cancelled bigint;
  found_in text := '';
BEGIN
  PERFORM rota.queue_read_committed();
  FOR slot IN 0..7 LOOP
    found_in := found_in || CASE WHEN slot > 0 THEN ' UNION ALL ' ELSE '' END || format(
      'SELECT %1$s AS slot, lane_id, int8range(greatest(lane_seq, lane_seq + $3 - frame),'
      ' least(lane_seq + n, lane_seq + $4::bigint - frame + 1)) AS turns FROM rota.ready_entries_%1$s'
      ' WHERE job_id = $1 AND layer_id = coalesce($2, layer_id) AND frame <= $4 AND frame + n > $3', slot);
  END LOOP;
  -- Locks all lanes of the job, so that cancelling another layer of it needs no further locks.
  FOR lane IN EXECUTE 'SELECT lane_id FROM (' || found_in || ') AS f'
                      ' UNION SELECT lane_id FROM rota.deferred_jobs WHERE job_id = $1 ORDER BY 1'
    USING of_job, NULL::uuid, 0, 2147483646
  LOOP
    PERFORM pg_advisory_xact_lock(1903519026, lane);
  END LOOP;
  cancelled := rota.queue_cancel_deferred(of_job, of_layer, first_frame, last_frame);
  FOR lane IN EXECUTE 'SELECT DISTINCT lane_id FROM (' || found_in || ') AS f ORDER BY 1'
    USING of_job, of_layer, first_frame, last_frame
  LOOP
    PERFORM pg_advisory_xact_lock(1903519026, lane);
    cursor := (rota.queue_cursor(lane, rota.queue_generation())).cursor;
    FOR entry IN EXECUTE 'SELECT slot, range_agg(turns) AS turns FROM (' || found_in || ') AS f WHERE lane_id = $5 GROUP BY 1'
      USING of_job, of_layer, first_frame, last_frame, lane
    LOOP
      behind := '{}';
      ahead := entry.turns * int8multirange(int8range(cursor, NULL)) - coalesce(
        (SELECT range_agg(int8range(t.first_seq, t.first_seq + t.n)) FROM rota.ready_tombstones t
         WHERE t.lane_id = lane AND t.ready_slot = entry.slot AND t.first_seq < upper(entry.turns)
           AND t.first_seq >= coalesce((  -- of ranges that begin before, only the last can reach into these positions
             SELECT u.first_seq FROM rota.ready_tombstones u WHERE u.lane_id = lane
               AND u.first_seq <= lower(entry.turns) ORDER BY u.lane_id DESC, u.first_seq DESC LIMIT 1), 0)), '{}');
      FOR returned IN
        SELECT * FROM rota.queue_returned r WHERE r.lane_id = lane AND r.ready_slot = entry.slot
          AND r.first_seq < upper(entry.turns) AND r.first_seq + r.n > lower(entry.turns)
      LOOP
        asked := int8multirange(int8range(returned.first_seq, returned.first_seq + returned.n));
        CONTINUE WHEN NOT asked && entry.turns;
        behind := behind + asked * entry.turns;
        DELETE FROM rota.queue_returned r WHERE r.lane_id = lane AND r.first_seq = returned.first_seq;
        INSERT INTO rota.queue_returned
        SELECT lane, lower(run), upper(run) - lower(run), entry.slot, returned.parked_job, returned.returned_at,
               returned.turn_of
        FROM unnest(asked - entry.turns) AS run;
      END LOOP;
      INSERT INTO rota.ready_tombstones (lane_id, first_seq, n, ready_slot)
      SELECT lane, lower(run), upper(run) - lower(run), entry.slot
      FROM (SELECT unnest(ahead) AS run UNION ALL SELECT unnest(behind)) AS cut;
      SELECT coalesce(sum(upper(run) - lower(run)), 0) INTO number FROM unnest(ahead + behind) AS run;
      IF number > 0 THEN
        PERFORM rota.queue_count(entry.slot, lane, waiting => -number, cancelled => number);
      END IF;
      cancelled := cancelled + number;
    END LOOP;
  END LOOP;
  RETURN cancelled;
END $$;

-- A deferred row leaves nothing behind to be counted later, so its frames go to the rollup immediately.
CREATE OR REPLACE FUNCTION rota.queue_cancel_deferred(of_job uuid, of_layer uuid, first_frame integer, last_frame integer)
RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
  cut record;
  cancelled bigint := 0;
BEGIN
  FOR cut IN
    WITH gone AS (
      DELETE FROM rota.deferred_jobs d
      WHERE d.job_id = of_job AND d.layer_id = coalesce(of_layer, d.layer_id)
        AND d.frame <= last_frame AND d.frame + d.n > first_frame
      RETURNING d.*
    ), rest AS (
      INSERT INTO rota.deferred_jobs (run_at, lane_id, n, job_id, layer_id, frame, attempt, payload)
      SELECT g.run_at, g.lane_id, upper(run) - lower(run), g.job_id, g.layer_id, lower(run), g.attempt, g.payload
      FROM gone g, unnest(int8multirange(int8range(g.frame, g.frame + g.n))
                          - int8multirange(int8range(first_frame, last_frame, '[]'))) AS run
      RETURNING lane_id, n
    )
    SELECT l.lane_id, l.queue, l.priority,
           (SELECT coalesce(sum(g.n), 0) FROM gone g WHERE g.lane_id = l.lane_id)
           - (SELECT coalesce(sum(r.n), 0) FROM rest r WHERE r.lane_id = l.lane_id) AS n
    FROM rota.queue_lanes l WHERE l.lane_id IN (SELECT g.lane_id FROM gone g) ORDER BY l.queue, l.priority
  LOOP
    PERFORM rota.queue_count(-1, cut.lane_id, deferred => -cut.n::bigint);
    PERFORM rota.queue_roll_up(cut.queue, cut.priority, cancelled => cut.n::bigint);
    cancelled := cancelled + cut.n;
  END LOOP;
  RETURN cancelled;
END $$;

CREATE OR REPLACE FUNCTION rota.queue_roll_up(
  of_queue text, of_priority smallint, completed bigint DEFAULT 0, cancelled bigint DEFAULT 0, failed bigint DEFAULT 0
) RETURNS void
LANGUAGE sql AS $$
  INSERT INTO rota.queue_terminal_rollups AS r VALUES (of_queue, of_priority, completed, cancelled, failed)
  ON CONFLICT (queue, priority) DO UPDATE SET
    pruned_completed_count = r.pruned_completed_count + excluded.pruned_completed_count,
    pruned_cancelled_count = r.pruned_cancelled_count + excluded.pruned_cancelled_count,
    pruned_failed_count = r.pruned_failed_count + excluded.pruned_failed_count
$$;

-- The removed row is the one that is counted down: of concurrent removals the first decides.
CREATE OR REPLACE FUNCTION rota.retry_job_tx(tokens bigint[]) RETURNS SETOF bigint
LANGUAGE plpgsql AS $$
DECLARE
  gone record;
BEGIN
  PERFORM rota.queue_read_committed();
  FOR gone IN
    WITH failed AS (
      DELETE FROM rota.done_entries d WHERE d.token = ANY (tokens) RETURNING d.*
    ), again AS (
      INSERT INTO rota.deferred_jobs (run_at, lane_id, n, job_id, layer_id, frame, attempt, payload)
      SELECT clock_timestamp(), f.lane_id, 1, f.job_id, f.layer_id, f.frame, 1, f.payload FROM failed f ORDER BY f.token
    )
    SELECT f.lane_id, array_agg(f.token) AS tokens FROM failed f GROUP BY 1 ORDER BY 1
  LOOP
    PERFORM rota.queue_count(-1, gone.lane_id, failed => -cardinality(gone.tokens), deferred => cardinality(gone.tokens));
    RETURN QUERY SELECT unnest(gone.tokens);
  END LOOP;
END $$;

CREATE OR REPLACE FUNCTION rota.move_failed_to_dlq(tokens bigint[]) RETURNS SETOF bigint
LANGUAGE plpgsql AS $$
DECLARE
  gone record;
BEGIN
  PERFORM rota.queue_read_committed();
  FOR gone IN
    WITH failed AS (
      DELETE FROM rota.done_entries d WHERE d.token = ANY (tokens) RETURNING d.*
    ), buried AS (
      INSERT INTO rota.dlq_entries (
        kind, reason, cause, lane_id, queue, job_id, layer_id, frame, attempt, payload, error)
      SELECT 'frame', f.reason, 'token:' || f.token, f.lane_id, l.queue, f.job_id, f.layer_id, f.frame, f.attempt,
             f.payload, f.error
      FROM failed f JOIN rota.queue_lanes l ON l.lane_id = f.lane_id ORDER BY f.token
    )
    SELECT f.lane_id, array_agg(f.token) AS tokens FROM failed f GROUP BY 1 ORDER BY 1
  LOOP
    PERFORM rota.queue_count(-1, gone.lane_id, failed => -cardinality(gone.tokens), dead => cardinality(gone.tokens));
    RETURN QUERY SELECT unnest(gone.tokens);
  END LOOP;
END $$;

-- Deletes failed frames. With `pruned` the rollup keeps counting them as failed.
CREATE OR REPLACE FUNCTION rota.queue_discard(tokens bigint[], pruned boolean) RETURNS SETOF bigint
LANGUAGE plpgsql AS $$
DECLARE
  gone record;
BEGIN
  PERFORM rota.queue_read_committed();
  FOR gone IN
    WITH failed AS (DELETE FROM rota.done_entries d WHERE d.token = ANY (tokens) RETURNING d.token, d.lane_id)
    SELECT l.lane_id, l.queue, l.priority, array_agg(f.token) AS tokens
    FROM failed f JOIN rota.queue_lanes l ON l.lane_id = f.lane_id GROUP BY 1, 2, 3 ORDER BY 2, 3, 1
  LOOP
    PERFORM rota.queue_count(-1, gone.lane_id, failed => -cardinality(gone.tokens));
    IF pruned THEN
      PERFORM rota.queue_roll_up(gone.queue, gone.priority, failed => cardinality(gone.tokens)::bigint);
    END IF;
    RETURN QUERY SELECT unnest(gone.tokens);
  END LOOP;
END $$;

-- Deletes dead letters, or, if they are frames and `again`, requeues them with their attempt numbers.
CREATE OR REPLACE FUNCTION rota.queue_dlq_remove(of_ids bigint[], again boolean) RETURNS SETOF bigint
LANGUAGE plpgsql AS $$
DECLARE
  gone record;
BEGIN
  PERFORM rota.queue_read_committed();
  FOR gone IN
    WITH dead AS (
      DELETE FROM rota.dlq_entries d
      WHERE d.dlq_id = ANY (of_ids) AND (NOT again OR d.lane_id IS NOT NULL) RETURNING d.*
    ), revived AS (
      INSERT INTO rota.deferred_jobs (run_at, lane_id, n, job_id, layer_id, frame, attempt, payload)
      SELECT clock_timestamp(), d.lane_id, 1, d.job_id, d.layer_id, d.frame, 1, d.payload FROM dead d
      WHERE again ORDER BY d.dlq_id
    )
    SELECT d.lane_id, array_agg(d.dlq_id) AS ids FROM dead d GROUP BY 1 ORDER BY 1
  LOOP
    IF gone.lane_id IS NOT NULL THEN
      PERFORM rota.queue_count(-1, gone.lane_id, dead => -cardinality(gone.ids),
                               deferred => CASE WHEN again THEN cardinality(gone.ids) ELSE 0 END);
    END IF;
    RETURN QUERY SELECT unnest(gone.ids);
  END LOOP;
END $$;
