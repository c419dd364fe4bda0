-- Reads after a lock must be newer than the lock, and only READ COMMITTED takes a snapshot per statement.
CREATE OR REPLACE FUNCTION rota.queue_read_committed() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  IF current_setting('transaction_isolation') <> 'read committed' THEN
    RAISE EXCEPTION USING ERRCODE = 'RT020', MESSAGE = 'the queue is used in READ COMMITTED transactions only';
  END IF;
END $$;

-- One read function and one end function per slot: their cached plans name the tables of the slot, so no other slot is
-- locked. Statistics of constantly truncated tables are always wrong, so they use index lookups only. Positions are
-- read from `first` on or not at all: if `first` is elsewhere (its slot was pruned between two reads), later positions
-- must not be handed out in its place.
DO $migration$
DECLARE
  lookups_only constant text := 'SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off'
    ' SET enable_mergejoin = off SET plan_cache_mode = force_generic_plan';
BEGIN
  FOR slot IN 0..7 LOOP
    EXECUTE format($f$
      CREATE OR REPLACE FUNCTION rota.queue_read_%1$s(of_lane integer, first bigint, most integer) RETURNS rota.queue_pieces
      LANGUAGE plpgsql %2$s AS $body$
      DECLARE
        pieces rota.queue_pieces;
      BEGIN
        SELECT sum(p.n), array_agg(p.n), array_agg(p.job_id), array_agg(p.layer_id), array_agg(p.frame),
               array_agg(p.attempt), array_agg(p.payload)
        INTO pieces
        FROM (
          SELECT (least(e.lane_seq + e.n, first + most) - greatest(e.lane_seq, first))::integer AS n,
                 e.job_id, e.layer_id, (e.frame + greatest(0, first - e.lane_seq))::integer AS frame,
                 e.attempt, e.payload
          FROM rota.ready_entries_%1$s e
          WHERE e.lane_id = of_lane AND e.lane_seq < first + most AND e.lane_seq >= (
            SELECT CASE WHEN b.lane_seq + b.n > first THEN b.lane_seq END
            FROM (SELECT b.lane_seq, b.n FROM rota.ready_entries_%1$s b
                  WHERE b.lane_id = of_lane AND b.lane_seq <= first ORDER BY b.lane_seq DESC LIMIT 1) AS b)
          ORDER BY e.lane_id, e.lane_seq
        ) AS p;
        RETURN pieces;
      END $body$
    $f$, slot, lookups_only);

    EXECUTE format($f$
      CREATE OR REPLACE FUNCTION rota.queue_since_%1$s(of_lane integer, seq bigint) RETURNS timestamptz
      LANGUAGE plpgsql %2$s AS $body$
      BEGIN
        RETURN (SELECT CASE WHEN e.lane_seq + e.n > seq THEN e.enqueued_at END FROM rota.ready_entries_%1$s e
                WHERE e.lane_id = of_lane AND e.lane_seq <= seq ORDER BY e.lane_seq DESC LIMIT 1);
      END $body$
    $f$, slot, lookups_only);

    -- How many of the next positions come before the first entry that is younger than `upto`; `seq` itself always does.
    EXECUTE format($f$
      CREATE OR REPLACE FUNCTION rota.queue_older_%1$s(of_lane integer, seq bigint, most integer, upto timestamptz)
      RETURNS integer
      LANGUAGE plpgsql %2$s AS $body$
      BEGIN
        RETURN coalesce((
          SELECT e.lane_seq - seq FROM rota.ready_entries_%1$s e
          WHERE e.lane_id = of_lane AND e.lane_seq > seq AND e.lane_seq < seq + most AND e.enqueued_at > upto
          ORDER BY e.lane_id, e.lane_seq LIMIT 1), most);
      END $body$
    $f$, slot, lookups_only);

    EXECUTE format($f$
      CREATE OR REPLACE FUNCTION rota.queue_end_%1$s(of_lane integer) RETURNS bigint
      LANGUAGE plpgsql %2$s AS $body$
      BEGIN
        RETURN (SELECT e.lane_seq + e.n FROM rota.ready_entries_%1$s e
                WHERE e.lane_id = of_lane ORDER BY e.lane_seq DESC LIMIT 1);
      END $body$
    $f$, slot, lookups_only);

    -- Appends entries from position `first` on; returns how many positions they have.
    EXECUTE format($f$
      CREATE OR REPLACE FUNCTION rota.queue_append_%1$s(
        of_lane integer, first bigint, jobs uuid[], layers uuid[], frames integer[], counts integer[], attempts smallint[],
        payloads bytea[]) RETURNS bigint
      LANGUAGE plpgsql AS $body$
      BEGIN
        INSERT INTO rota.ready_entries_%1$s
        SELECT %1$s, of_lane, first + sum(e.n) OVER (ROWS UNBOUNDED PRECEDING) - e.n, e.n, e.job, e.layer, e.frame,
               e.attempt, e.payload, now()
        FROM unnest(jobs, layers, frames, counts, attempts, payloads) AS e (job, layer, frame, n, attempt, payload);
        RETURN (SELECT sum(c) FROM unnest(counts) AS c);
      END $body$
    $f$, slot);

    -- Appends one entry behind the last position of the lane, counts it and returns its position. Null: the slot has no
    -- position of the lane. Only for the open slot, which has the newest positions.
    EXECUTE format($f$
      CREATE OR REPLACE FUNCTION rota.queue_append_next_%1$s(
        of_lane integer, of_job uuid, of_layer uuid, of_frame integer, of_count integer, of_payload bytea) RETURNS bigint
      LANGUAGE plpgsql %2$s AS $body$
      DECLARE
        seq bigint;
      BEGIN
        INSERT INTO rota.ready_entries_%1$s
        SELECT %1$s, of_lane,
               greatest(e.lane_seq + e.n, (SELECT b.next_seq FROM rota.queue_lane_bases b WHERE b.lane_id = of_lane)),
               of_count, of_job, of_layer, of_frame, 1, of_payload, now()
        FROM rota.ready_entries_%1$s e WHERE e.lane_id = of_lane ORDER BY e.lane_seq DESC LIMIT 1
        RETURNING lane_seq INTO seq;
        IF seq IS NOT NULL THEN
          INSERT INTO rota.queue_terminal_count_deltas
          SELECT t.last_value %% 4, %1$s, of_lane, of_count, 0, 0, 0, 0, 0, 0
          FROM rota.queue_delta_turn AS t, rota.queue_storage AS s WHERE s.counter_mode = 'ledger';
        END IF;
        RETURN seq;
      END $body$
    $f$, slot, lookups_only);

    EXECUTE format($f$
      CREATE OR REPLACE FUNCTION rota.queue_claimed_%1$s(of_lane integer) RETURNS bigint
      LANGUAGE plpgsql %2$s AS $body$
      BEGIN
        RETURN (SELECT c.last_seq + 1 FROM rota.queue_claims_%1$s c
                WHERE c.lane_id = of_lane ORDER BY c.last_seq DESC LIMIT 1);
      END $body$
    $f$, slot, lookups_only);

    EXECUTE format($f$
      CREATE OR REPLACE FUNCTION rota.queue_goes_on_%1$s(of_lane integer, seq bigint, of_job uuid) RETURNS boolean
      LANGUAGE plpgsql %2$s AS $body$
      BEGIN
        RETURN coalesce((
          SELECT e.job_id = of_job AND e.lane_seq + e.n > seq FROM rota.ready_entries_%1$s e
          WHERE e.lane_id = of_lane AND e.lane_seq <= seq ORDER BY e.lane_seq DESC LIMIT 1), false);
      END $body$
    $f$, slot, lookups_only);

    -- Whether the job has the position `seq` too, and whether a later entry of the slot is of another job. A job may
    -- have any number of entries, so only the next and the last ones are looked at.
    EXECUTE format($f$
      CREATE OR REPLACE FUNCTION rota.queue_behind_%1$s(
        of_lane integer, seq bigint, of_job uuid, OUT goes_on boolean, OUT others boolean)
      LANGUAGE plpgsql %2$s AS $body$
      BEGIN
        goes_on := coalesce((
          SELECT e.job_id = of_job AND e.lane_seq + e.n > seq FROM rota.ready_entries_%1$s e
          WHERE e.lane_id = of_lane AND e.lane_seq <= seq ORDER BY e.lane_seq DESC LIMIT 1), false);
        others := EXISTS (
          SELECT FROM (SELECT e.job_id, e.lane_seq FROM rota.ready_entries_%1$s e WHERE e.lane_id = of_lane
                       ORDER BY e.lane_seq DESC LIMIT 64) AS last WHERE job_id <> of_job AND lane_seq > seq)
          OR EXISTS (
          SELECT FROM (SELECT e.job_id FROM rota.ready_entries_%1$s e WHERE e.lane_id = of_lane AND e.lane_seq > seq
                       ORDER BY e.lane_id, e.lane_seq LIMIT 64) AS next WHERE job_id <> of_job);
      END $body$
    $f$, slot, lookups_only);

    -- The same for many lanes. Arrays have an element per lane, in order; of the lanes with an element in `known` nothing
    -- is read.
    EXECUTE format($f$
      CREATE OR REPLACE FUNCTION rota.queue_end_each_%1$s(lanes integer[], known bigint[]) RETURNS bigint[]
      LANGUAGE plpgsql %2$s AS $body$
      BEGIN
        RETURN ARRAY(
          SELECT CASE WHEN u.known IS NOT NULL THEN u.known ELSE (
            SELECT e.lane_seq + e.n FROM rota.ready_entries_%1$s e
            WHERE e.lane_id = u.lane ORDER BY e.lane_seq DESC LIMIT 1) END
          FROM unnest(lanes, known) WITH ORDINALITY AS u (lane, known, place) ORDER BY u.place);
      END $body$
    $f$, slot, lookups_only);

    EXECUTE format($f$
      CREATE OR REPLACE FUNCTION rota.queue_claimed_each_%1$s(lanes integer[], known bigint[]) RETURNS bigint[]
      LANGUAGE plpgsql %2$s AS $body$
      BEGIN
        RETURN ARRAY(
          SELECT CASE WHEN u.known IS NOT NULL THEN u.known ELSE (
            SELECT c.last_seq + 1 FROM rota.queue_claims_%1$s c
            WHERE c.lane_id = u.lane ORDER BY c.last_seq DESC LIMIT 1) END
          FROM unnest(lanes, known) WITH ORDINALITY AS u (lane, known, place) ORDER BY u.place);
      END $body$
    $f$, slot, lookups_only);

    EXECUTE format($f$
      CREATE OR REPLACE FUNCTION rota.queue_since_each_%1$s(lanes integer[], seqs bigint[], known timestamptz[])
      RETURNS timestamptz[]
      LANGUAGE plpgsql %2$s AS $body$
      BEGIN
        RETURN ARRAY(
          SELECT CASE WHEN u.known IS NOT NULL THEN u.known ELSE (
            SELECT CASE WHEN e.lane_seq + e.n > u.seq THEN e.enqueued_at END FROM rota.ready_entries_%1$s e
            WHERE e.lane_id = u.lane AND e.lane_seq <= u.seq ORDER BY e.lane_seq DESC LIMIT 1) END
          FROM unnest(lanes, seqs, known) WITH ORDINALITY AS u (lane, seq, known, place) ORDER BY u.place);
      END $body$
    $f$, slot, lookups_only);

    -- Appends entries of many groups: entry i belongs to group `of_groups[i]`, which begins at position `firsts` of the
    -- lane in `lanes`.
    EXECUTE format($f$
      CREATE OR REPLACE FUNCTION rota.queue_append_each_%1$s(
        lanes integer[], firsts bigint[], of_groups integer[], jobs uuid[], layers uuid[], frames integer[],
        counts integer[], attempts smallint[], payloads bytea[]) RETURNS void
      LANGUAGE plpgsql AS $body$
      BEGIN
        INSERT INTO rota.ready_entries_%1$s
        SELECT %1$s, lanes[e.of_group],
               firsts[e.of_group] + sum(e.n) OVER (PARTITION BY e.of_group ORDER BY e.at ROWS UNBOUNDED PRECEDING) - e.n,
               e.n, e.job, e.layer, e.frame, e.attempt, e.payload, now()
        FROM unnest(of_groups, jobs, layers, frames, counts, attempts, payloads) WITH ORDINALITY
          AS e (of_group, job, layer, frame, n, attempt, payload, at);
      END $body$
    $f$, slot);

    -- Claims up to `mosts` positions from `firsts` on of many locked lanes, and counts them. A row without a claim: the
    -- last job goes on behind them, and jobs take turns. No row: nothing of the lane is in this slot.
    EXECUTE format($f$
      CREATE OR REPLACE FUNCTION rota.queue_take_each_%1$s(
        lanes integer[], firsts bigint[], mosts integer[], in_turns boolean[], by bigint)
      RETURNS TABLE (
        place integer, claim_id bigint, n integer, sizes integer[], jobs uuid[], layers uuid[], frames integer[],
        attempts smallint[], payloads bytea[])
      LANGUAGE plpgsql %2$s AS $body$
      #variable_conflict use_column
      BEGIN
        RETURN QUERY
          WITH found AS MATERIALIZED (
            SELECT u.place::integer, u.lane, u.first, p.n::integer, p.sizes, p.jobs, p.layers, p.frames, p.attempts,
                   p.payloads, u.in_turns AND p.n = u.most AND coalesce((
                     SELECT e.job_id = p.jobs[cardinality(p.jobs)] AND e.lane_seq + e.n > u.first + u.most
                     FROM rota.ready_entries_%1$s e
                     WHERE e.lane_id = u.lane AND e.lane_seq <= u.first + u.most ORDER BY e.lane_seq DESC LIMIT 1),
                   false) AS goes_on
            FROM unnest(lanes, firsts, mosts, in_turns) WITH ORDINALITY AS u (lane, first, most, in_turns, place)
            CROSS JOIN LATERAL (
              SELECT sum(r.n) AS n, array_agg(r.n) AS sizes, array_agg(r.job_id) AS jobs, array_agg(r.layer_id) AS layers,
                     array_agg(r.frame) AS frames, array_agg(r.attempt) AS attempts, array_agg(r.payload) AS payloads
              FROM (
                SELECT (least(e.lane_seq + e.n, u.first + u.most) - greatest(e.lane_seq, u.first))::integer AS n,
                       e.job_id, e.layer_id, (e.frame + greatest(0, u.first - e.lane_seq))::integer AS frame,
                       e.attempt, e.payload
                FROM rota.ready_entries_%1$s e
                WHERE e.lane_id = u.lane AND e.lane_seq < u.first + u.most AND e.lane_seq >= (
                  SELECT CASE WHEN b.lane_seq + b.n > u.first THEN b.lane_seq END
                  FROM (SELECT b.lane_seq, b.n FROM rota.ready_entries_%1$s b
                        WHERE b.lane_id = u.lane AND b.lane_seq <= u.first ORDER BY b.lane_seq DESC LIMIT 1) AS b)
                ORDER BY e.lane_id, e.lane_seq
              ) AS r
            ) AS p
            WHERE p.n > 0
          ), numbered AS MATERIALIZED (
            SELECT f.*, CASE WHEN NOT f.goes_on THEN nextval('rota.queue_claim_ids') * 8 + %1$s END AS id FROM found f
          ), written AS (
            INSERT INTO rota.queue_claims_%1$s (ready_slot, claim_id, lane_id, last_seq, n, owner)
            SELECT %1$s, c.id, c.lane, c.first + c.n - 1, c.n, by FROM numbered c WHERE c.id IS NOT NULL
          ), counted AS (
            INSERT INTO rota.queue_terminal_count_deltas
            SELECT t.last_value %% 4, %1$s, c.lane, -c.n, c.n, 0, 0, 0, 0, 0
            FROM numbered c, rota.queue_delta_turn AS t, rota.queue_storage AS s
            WHERE s.counter_mode = 'ledger' AND c.id IS NOT NULL
          )
          SELECT c.place, c.id, c.n, c.sizes, c.jobs, c.layers, c.frames, c.attempts, c.payloads FROM numbered c;
      END $body$
    $f$, slot, lookups_only);

    EXECUTE format($f$
      CREATE OR REPLACE FUNCTION rota.queue_close_%1$s(how integer, ids bigint[], masks varbit[])
      RETURNS TABLE (claim_id bigint, lane_id integer, first_seq bigint, closed varbit)
      LANGUAGE plpgsql %2$s AS $body$
      #variable_conflict use_column
      BEGIN
        RETURN QUERY
          WITH judged AS MATERIALIZED (
            SELECT c.claim_id, c.lane_id, c.last_seq - c.n + 1 AS first_seq,
                   rota.queue_mask(asked.mask, c.n) & ~coalesce(
                     (SELECT bit_or(x.bits) FROM rota.queue_closures_%1$s x WHERE x.claim_id = c.claim_id),
                     rota.queue_mask(B'', c.n)) AS closed
            FROM unnest(ids, masks) AS asked (claim_id, mask)
            JOIN rota.queue_claims_%1$s c ON c.claim_id = asked.claim_id
            WHERE c.n > 0
          ), written AS (
            INSERT INTO rota.queue_closures_%1$s (ready_slot, claim_id, outcome, n, bits)
            SELECT %1$s, j.claim_id, how, bit_count(j.closed), j.closed FROM judged j WHERE bit_count(j.closed) > 0
          )
          SELECT j.claim_id, j.lane_id, j.first_seq, j.closed::varbit FROM judged j;
      END $body$
    $f$, slot, lookups_only);
  END LOOP;
  -- The function of a slot, without planning a statement for each call.
  EXECUTE (
    SELECT string_agg(format(
      'CREATE OR REPLACE FUNCTION rota.%1$s(slot integer, %2$s) RETURNS %3$s LANGUAGE plpgsql AS '
      '$body$ BEGIN CASE slot %4$s END CASE; END $body$', f.name, f.parameters, f.returns, (
        SELECT string_agg(format('WHEN %1$s THEN RETURN rota.%2$s_%1$s(%3$s);', k, f.name, f.given), ' ')
        FROM generate_series(0, 7) AS k)), ';')
    FROM (VALUES
      ('queue_read', 'of_lane integer, first bigint, most integer', 'rota.queue_pieces', 'of_lane, first, most'),
      ('queue_end', 'of_lane integer', 'bigint', 'of_lane'),
      ('queue_append', 'of_lane integer, first bigint, jobs uuid[], layers uuid[], frames integer[], counts integer[],'
       ' attempts smallint[], payloads bytea[]', 'bigint',
       'of_lane, first, jobs, layers, frames, counts, attempts, payloads'),
      ('queue_append_next', 'of_lane integer, of_job uuid, of_layer uuid, of_frame integer, of_count integer,'
       ' of_payload bytea', 'bigint', 'of_lane, of_job, of_layer, of_frame, of_count, of_payload'),
      ('queue_since', 'of_lane integer, seq bigint', 'timestamptz', 'of_lane, seq'),
      ('queue_older', 'of_lane integer, seq bigint, most integer, upto timestamptz', 'integer',
       'of_lane, seq, most, upto'),
      ('queue_claimed', 'of_lane integer', 'bigint', 'of_lane'),
      ('queue_goes_on', 'of_lane integer, seq bigint, of_job uuid', 'boolean', 'of_lane, seq, of_job'),
      ('queue_end_each', 'lanes integer[], known bigint[]', 'bigint[]', 'lanes, known'),
      ('queue_claimed_each', 'lanes integer[], known bigint[]', 'bigint[]', 'lanes, known'),
      ('queue_since_each', 'lanes integer[], seqs bigint[], known timestamptz[]', 'timestamptz[]', 'lanes, seqs, known')
    ) AS f (name, parameters, returns, given));
  EXECUTE (
    SELECT string_agg(format(
      'CREATE OR REPLACE FUNCTION rota.%1$s(slot integer, %2$s) RETURNS %3$s LANGUAGE plpgsql AS '
      '$body$ BEGIN CASE slot %4$s END CASE; END $body$', f.name, f.parameters, f.returns, (
        SELECT string_agg(format('WHEN %1$s THEN %2$s rota.%3$s_%1$s(%4$s);', k, f.call, f.name, f.given), ' ')
        FROM generate_series(0, 7) AS k)), ';')
    FROM (VALUES
      ('queue_append_each', 'lanes integer[], firsts bigint[], of_groups integer[], jobs uuid[], layers uuid[],'
       ' frames integer[], counts integer[], attempts smallint[], payloads bytea[]', 'void', 'PERFORM',
       'lanes, firsts, of_groups, jobs, layers, frames, counts, attempts, payloads'),
      ('queue_take_each', 'lanes integer[], firsts bigint[], mosts integer[], in_turns boolean[], by bigint',
       'TABLE (place integer, claim_id bigint, n integer, sizes integer[], jobs uuid[], layers uuid[], frames integer[],'
       ' attempts smallint[], payloads bytea[])', 'RETURN QUERY SELECT * FROM',
       'lanes, firsts, mosts, in_turns, by')
    ) AS f (name, parameters, returns, call, given));
END $migration$;

-- The mask with exactly `n` bits: callers need not know the length of a claim.
CREATE OR REPLACE FUNCTION rota.queue_mask(mask varbit, n integer) RETURNS varbit
LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE WHEN length(mask) = n THEN mask ELSE substring(mask || repeat('0', 512)::varbit FROM 1 FOR n) END
$$;

-- How many positions a job gets at a time while other jobs of its queue wait.
CREATE OR REPLACE FUNCTION rota.queue_quantum() RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 64';

-- Returned positions of the lane that are claimed before the others; then what was put aside, the job first that has
-- waited longest since its last turn.
CREATE OR REPLACE FUNCTION rota.queue_first_returned(of_lane integer) RETURNS rota.queue_returned
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
DECLARE
  back rota.queue_returned;
BEGIN
  SELECT * INTO back FROM rota.queue_returned r
  WHERE r.lane_id = of_lane AND r.parked_job IS NULL AND r.turn_of IS NULL ORDER BY r.lane_id, r.first_seq LIMIT 1;
  IF NOT FOUND THEN
    SELECT * INTO back FROM rota.queue_returned r
    WHERE r.lane_id = of_lane AND r.parked_job IS NULL AND r.turn_of IS NOT NULL
    ORDER BY r.lane_id, r.returned_at, r.first_seq LIMIT 1;
  END IF;
  RETURN back;
END $$;

-- Whether another job than `of_job` waits for its turn: put aside, or behind `seq`, which is in the slot of this age. Not
-- all are looked at, see `queue_behind_k`.
CREATE OR REPLACE FUNCTION rota.queue_others_wait(of_lane integer, of_job uuid, seq bigint, age integer, generation bigint)
RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
  others boolean := EXISTS (
    SELECT FROM rota.queue_returned r
    WHERE r.lane_id = of_lane AND r.parked_job IS NULL AND r.turn_of <> of_job);
BEGIN
  FOR younger IN REVERSE age .. 0 LOOP
    EXIT WHEN others;
    EXECUTE format('SELECT others FROM rota.queue_behind_%s($1, $2, $3)', rota.queue_slot(generation, younger))
      INTO others USING of_lane, seq, of_job;
  END LOOP;
  RETURN others;
END $$;

-- Claims positions of one locked lane: returned ones first, then from the cursor on. If jobs take turns, one that has
-- more than it got is put aside while others wait, here or in other lanes (`elsewhere`), and gets at most a quantum. Null
-- `claim_id`: none available.
CREATE OR REPLACE FUNCTION rota.queue_take(
  of_lane integer, most integer, by bigint, in_turns boolean, elsewhere boolean,
  OUT claim_id bigint, OUT n integer, OUT first_seq bigint, OUT skipped varbit, OUT pieces rota.queue_pieces
)
LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
  quantum constant integer := rota.queue_quantum();
  generation bigint := rota.queue_generation();
  back rota.queue_returned := rota.queue_first_returned(of_lane);
  since timestamptz;
  at record;
  slot integer;
  slot_age integer;
  last_job uuid;
  goes_on boolean := false;
  tail integer := 0;
BEGIN
  most := least(most, 512);
  IF back.turn_of IS NOT NULL THEN
    since := rota.queue_cursor_since(of_lane, generation);
    IF since < back.returned_at THEN
      back := NULL;
    ELSIF elsewhere OR since IS NOT NULL OR EXISTS (
      SELECT FROM rota.queue_returned r WHERE r.lane_id = of_lane AND r.parked_job IS NULL AND r.turn_of <> back.turn_of)
    THEN
      most := least(most, quantum);
    END IF;
  END IF;

  IF back.lane_id IS NOT NULL THEN
    slot := back.ready_slot;
    first_seq := back.first_seq;
    n := least(most, back.n);
    pieces := rota.queue_read(slot, of_lane, first_seq, n);
    IF pieces.n IS DISTINCT FROM n THEN
      RETURN;  -- just carried out of this slot
    END IF;
    PERFORM rota.queue_take_returned(back, n, pieces.jobs[cardinality(pieces.jobs)], generation, in_turns, elsewhere);
  ELSE
    SELECT * INTO at FROM rota.queue_cursor(of_lane, generation);
    first_seq := rota.queue_past_tombstones(of_lane, at.cursor);
    FOR age IN REVERSE at.age .. 0 LOOP
      slot := rota.queue_slot(generation, age);
      slot_age := age;
      pieces := rota.queue_read(slot, of_lane, first_seq, most);
      EXIT WHEN pieces.n > 0;
    END LOOP;
    IF pieces.n IS NULL THEN
      RETURN;
    END IF;
    n := pieces.n;
    IF in_turns THEN
      last_job := pieces.jobs[cardinality(pieces.jobs)];
      goes_on := rota.queue_goes_on(slot, of_lane, first_seq + n, last_job) AND (
        elsewhere OR rota.queue_others_wait(of_lane, last_job, first_seq + n, slot_age, generation));
    END IF;
    IF goes_on AND n > quantum THEN
      FOR place IN REVERSE cardinality(pieces.jobs) .. 1 LOOP
        EXIT WHEN pieces.jobs[place] <> last_job;
        tail := tail + pieces.sizes[place];
      END LOOP;
      IF tail > quantum THEN
        n := n - tail + quantum;
        pieces := rota.queue_read(slot, of_lane, first_seq, n);
      END IF;
    END IF;
    skipped := rota.queue_tombstoned(of_lane, first_seq, n);
    -- A claim ends with a position that it hands out, so no cancelled range spans the cursor.
    IF get_bit(skipped, n - 1) = 1 THEN
      n := length(rtrim(skipped::text, '1'));
      pieces := rota.queue_read(slot, of_lane, first_seq, n);
      skipped := rota.queue_tombstoned(of_lane, first_seq, n);
    END IF;
  END IF;

  claim_id := nextval('rota.queue_claim_ids') * 8 + slot;
  INSERT INTO rota.queue_claims (ready_slot, claim_id, lane_id, last_seq, n, owner)
  VALUES (slot, claim_id, of_lane, first_seq + n - 1, n, by);
  IF skipped IS NULL THEN
    PERFORM rota.queue_count(slot, of_lane, waiting => -n, running => n);
  ELSE
    INSERT INTO rota.queue_closures (ready_slot, claim_id, outcome, n, bits)
    VALUES (slot, claim_id, 0, bit_count(skipped), skipped);
    PERFORM rota.queue_count(slot, of_lane, waiting => bit_count(skipped) - n, running => n - bit_count(skipped));
  END IF;
  IF goes_on THEN
    PERFORM rota.queue_put_aside(of_lane, last_job, NULL, last_job);
  END IF;
END $$;

-- Removes the first `taken` positions of a returned range. If its job has more of them and others wait, the rest is put
-- aside, and is the last to have a turn.
CREATE OR REPLACE FUNCTION rota.queue_take_returned(
  back rota.queue_returned, taken integer, last_job uuid, generation bigint, in_turns boolean, elsewhere boolean
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
  rest_seq bigint := back.first_seq + taken;
  rest_end bigint := back.first_seq + back.n;
  job_end bigint := rest_seq;
  had_turn timestamptz := clock_timestamp();
  at record;
  goes_on boolean;
BEGIN
  IF back.turn_of IS NOT NULL THEN
    job_end := rest_end;
  ELSIF in_turns AND rest_seq < rest_end THEN
    goes_on := rota.queue_goes_on(back.ready_slot, back.lane_id, rest_seq, last_job);
    SELECT * INTO at FROM rota.queue_cursor(back.lane_id, generation);
    IF goes_on AND (
      elsewhere OR rota.queue_others_wait(back.lane_id, last_job, at.cursor - 1, at.age, generation))
    THEN
      EXECUTE format($q$
        SELECT coalesce((SELECT e.lane_seq FROM rota.ready_entries_%s e WHERE e.lane_id = $1 AND e.lane_seq > $2
                         AND e.lane_seq < $3 AND e.job_id <> $4 ORDER BY e.lane_seq LIMIT 1), $3)
      $q$, back.ready_slot) INTO job_end USING back.lane_id, rest_seq, rest_end, last_job;
    END IF;
  END IF;
  DELETE FROM rota.queue_returned r WHERE r.lane_id = back.lane_id AND r.first_seq = back.first_seq;
  IF rest_seq < job_end THEN
    INSERT INTO rota.queue_returned (lane_id, first_seq, n, ready_slot, returned_at, turn_of)
    VALUES (back.lane_id, rest_seq, job_end - rest_seq, back.ready_slot, had_turn, coalesce(back.turn_of, last_job));
  END IF;
  IF job_end < rest_end THEN
    INSERT INTO rota.queue_returned (lane_id, first_seq, n, ready_slot, returned_at)
    VALUES (back.lane_id, job_end, rest_end - job_end, back.ready_slot, back.returned_at);
  END IF;
  IF back.turn_of IS NULL AND rest_seq < job_end THEN
    PERFORM rota.queue_put_aside(back.lane_id, last_job, NULL, last_job);
  END IF;
END $$;

-- The first position from `seq` on that is not tombstoned.
CREATE OR REPLACE FUNCTION rota.queue_past_tombstones(of_lane integer, seq bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
  stone record;
BEGIN
  SELECT t.first_seq, t.first_seq + t.n AS next INTO stone FROM rota.ready_tombstones t
  WHERE t.lane_id = of_lane AND t.first_seq <= seq ORDER BY t.lane_id DESC, t.first_seq DESC LIMIT 1;
  IF stone.next > seq THEN
    RETURN rota.queue_tombstones_end(of_lane, stone.first_seq);
  END IF;
  RETURN seq;
END $$;

-- The end of the contiguous tombstones that begin at `first`. Ranges do not overlap, and there may be very many.
CREATE OR REPLACE FUNCTION rota.queue_tombstones_end(of_lane integer, first bigint) RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off AS $$
BEGIN
  RETURN (
    SELECT t.first_seq + t.n FROM rota.ready_tombstones t
    WHERE t.lane_id = of_lane AND t.first_seq >= first AND NOT EXISTS (
      SELECT FROM rota.ready_tombstones u WHERE u.lane_id = t.lane_id AND u.first_seq = t.first_seq + t.n)
    ORDER BY t.lane_id, t.first_seq LIMIT 1);
END $$;

-- Tombstoned positions after `first`, which is not one of them; null if there are none.
CREATE OR REPLACE FUNCTION rota.queue_tombstoned(of_lane integer, first bigint, turns integer) RETURNS varbit
LANGUAGE plpgsql AS $$
BEGIN
  RETURN (
    SELECT bit_or(rota.queue_mask(
      repeat('0', (t.first_seq - first)::integer)::varbit || repeat('1', least(t.n, 512))::varbit, turns))
    FROM rota.ready_tombstones t
    WHERE t.lane_id = of_lane AND t.first_seq > first AND t.first_seq < first + turns);
END $$;

-- Since when the job whose turn is next in the lane has been waiting for it; null if nothing can be claimed. A hint, as
-- the lane is not locked.
CREATE OR REPLACE FUNCTION rota.queue_turn_since(of_lane integer) RETURNS timestamptz
LANGUAGE plpgsql AS $$
DECLARE
  back rota.queue_returned := rota.queue_first_returned(of_lane);
BEGIN
  IF back.lane_id IS NOT NULL AND back.turn_of IS NULL THEN
    RETURN '-infinity';
  END IF;
  RETURN least(back.returned_at, rota.queue_cursor_since(of_lane, rota.queue_generation()));
END $$;

-- How many positions of the lane come next while the next turn in another lane has waited since `other`. Jobs that came
-- some seconds later than that one do not pass it: the claim goes on with the other lane before. Not exact to the
-- position, as lanes with many small jobs would be read in turns of one.
CREATE OR REPLACE FUNCTION rota.queue_turn_frames(of_lane integer, most integer, other timestamptz) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
  generation bigint := rota.queue_generation();
  back rota.queue_returned := rota.queue_first_returned(of_lane);
  at record;
  slot integer;
  since timestamptz;
BEGIN
  IF back.lane_id IS NOT NULL AND back.turn_of IS NULL THEN
    RETURN most;
  END IF;
  SELECT rota.queue_past_tombstones(of_lane, c.cursor) AS seq, c.age INTO at FROM rota.queue_cursor(of_lane, generation) AS c;
  FOR age IN REVERSE at.age .. 0 LOOP
    slot := rota.queue_slot(generation, age);
    since := rota.queue_since(slot, of_lane, at.seq);
    EXIT WHEN since IS NOT NULL;
  END LOOP;
  IF since IS NULL OR since >= back.returned_at THEN
    RETURN most;  -- the turn of a job that was put aside
  END IF;
  RETURN rota.queue_older(slot, of_lane, at.seq, most, other + interval '5 s');
END $$;

-- Locks the lanes of requests that have a single lane, which no other request has. `mosts` is how much `queue_take_each`
-- may claim of each. It is null for the others, if the lane has returned positions that wait or cancelled ones ahead of
-- its cursor, or is locked by another session. `age` is that of the oldest slot to look in. The generation is read under
-- the locks: of an older one the newest slot would seem to be the oldest, and what was claimed there would be claimed again.
CREATE OR REPLACE FUNCTION rota.queue_lock_singles(
  lanes integer[], requests integer[], wants integer[],
  OUT of_requests integer[], OUT of_lanes integer[], OUT in_turns boolean[], OUT locked boolean[],
  OUT cursors bigint[], OUT mosts integer[], OUT age integer, OUT generation bigint
)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
BEGIN
  SELECT array_agg(s.request), array_agg(s.lane_id), array_agg(s.by_job),
         array_agg(pg_try_advisory_xact_lock(1903519026, s.lane_id))
  INTO of_requests, of_lanes, in_turns, locked
  FROM (
    SELECT u.request, u.lane_id, q.by_job
    FROM (SELECT g.request, g.lane_id, count(*) OVER (PARTITION BY g.request) AS lanes_of_request,
                 count(*) OVER (PARTITION BY g.lane_id) AS requests_of_lane
          FROM unnest(requests, lanes) AS g (request, lane_id)) AS u
    JOIN rota.queue_lanes l ON l.lane_id = u.lane_id JOIN rota.queues q ON q.queue = l.queue
    WHERE u.lanes_of_request = 1 AND u.requests_of_lane = 1 AND NOT q.paused
    OFFSET 0  -- filter before locking
  ) AS s;
  IF of_lanes IS NULL THEN
    RETURN;
  END IF;
  generation := rota.queue_generation();
  SELECT * INTO cursors, age FROM rota.queue_cursor_each(of_lanes, generation);
  mosts := ARRAY(
    SELECT CASE WHEN u.locked AND (
      SELECT true FROM rota.queue_returned r WHERE r.lane_id = u.lane AND r.parked_job IS NULL
      ORDER BY r.lane_id, r.first_seq LIMIT 1) IS NULL AND coalesce((
      SELECT t.first_seq + t.n <= u.cursor FROM rota.ready_tombstones t WHERE t.lane_id = u.lane
      ORDER BY t.lane_id DESC, t.first_seq DESC LIMIT 1), true) THEN least(wants[u.request], 512) END
    FROM unnest(of_requests, of_lanes, locked, cursors) WITH ORDINALITY AS u (request, lane, locked, cursor, place)
    ORDER BY u.place);
END $$;

-- Each lane is of one request, by its number from 1 on, and `wants` says how much each request wants of its lanes
-- together, in order. Of several lanes of a queue and priority the next is the one whose job has waited longest for its
-- turn. A lane that is locked is skipped, and a row without a claim says so.
-- Of several requests, those with a single lane are served together first: it costs a fraction of `queue_take` for each.
CREATE OR REPLACE FUNCTION rota.queue_claim_each(lanes integer[], requests integer[], wants integer[], by bigint)
RETURNS TABLE (
  request integer, lane_id integer, claim_id bigint, n integer, first_seq bigint, skipped varbit,
  sizes integer[], jobs uuid[], layers uuid[], frames integer[], attempts smallint[], payloads bytea[]
)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  given record;
  taken record;
  since timestamptz[];
  at integer;
  share integer;
  other timestamptz;
  claims_left integer := 64 + cardinality(wants);
  generation bigint;
  singles integer[];
  of_lanes integer[];
  turns boolean[];
  locked boolean[];
  cursors bigint[];
  mosts integer[];
  oldest integer;
BEGIN
  PERFORM rota.queue_read_committed();
  PERFORM pg_advisory_xact_lock_shared(1903519028, (by & 2147483647)::integer);
  PERFORM 1 FROM rota.queue_owners o WHERE o.owner = by AND NOT o.dead;
  IF NOT FOUND THEN
    RAISE EXCEPTION USING ERRCODE = 'RT022', MESSAGE = format('owner %s may not claim', by);
  END IF;

  IF cardinality(wants) > 1 THEN
    SELECT * INTO singles, of_lanes, turns, locked, cursors, mosts, oldest, generation
    FROM rota.queue_lock_singles(lanes, requests, wants);
  END IF;
  FOR age IN 0 .. coalesce(oldest, -1) LOOP
    FOR taken IN
      SELECT * FROM rota.queue_take_each(rota.queue_slot(generation, age), of_lanes, cursors, mosts, turns, by)
    LOOP
      at := taken.place;
      IF taken.claim_id IS NOT NULL THEN
        request := singles[at];
        -- Nothing is behind the end of the open slot.
        wants[request] := CASE WHEN age = 0 AND taken.n < mosts[at] THEN 0 ELSE wants[request] - taken.n END;
        claims_left := claims_left - 1;
        lane_id := of_lanes[at];
        claim_id := taken.claim_id;
        n := taken.n;
        first_seq := cursors[at];
        sizes := taken.sizes;
        jobs := taken.jobs;
        layers := taken.layers;
        frames := taken.frames;
        attempts := taken.attempts;
        payloads := taken.payloads;
        RETURN NEXT;
      END IF;
      mosts[at] := NULL;
    END LOOP;
  END LOOP;
  FOR place IN 1 .. coalesce(cardinality(singles), 0) LOOP
    IF mosts[place] IS NOT NULL THEN
      wants[singles[place]] := 0;  -- the lane is empty
    END IF;
  END LOOP;
  IF NOT 0 < ANY (wants) THEN
    RETURN;
  END IF;

  FOR given IN
    SELECT g.request, array_agg(l.lane_id ORDER BY g.place) AS lanes, bool_and(q.by_job) AS in_turns
    FROM unnest(lanes, requests) WITH ORDINALITY AS g (lane_id, request, place)
    JOIN rota.queue_lanes l ON l.lane_id = g.lane_id JOIN rota.queues q ON q.queue = l.queue
    WHERE NOT q.paused AND wants[g.request] > 0 GROUP BY g.request, l.queue, l.priority ORDER BY min(g.place)
  LOOP
    request := given.request;
    at := 1;
    IF cardinality(given.lanes) > 1 THEN
      since := ARRAY(SELECT rota.queue_turn_since(lane) FROM unnest(given.lanes) WITH ORDINALITY AS u (lane, place)
                     ORDER BY place);
    ELSE
      since := ARRAY[now()];
    END IF;
    WHILE wants[request] > 0 AND claims_left > 0 LOOP
      IF cardinality(since) > 1 THEN
        SELECT u.place, greatest(rota.queue_quantum(), wants[request] / count(*) OVER ()),
               lead(u.turn) OVER (ORDER BY u.turn, u.place)
        INTO at, share, other
        FROM unnest(since) WITH ORDINALITY AS u (turn, place) WHERE u.turn IS NOT NULL ORDER BY u.turn, u.place LIMIT 1;
      ELSE
        share := wants[request];
      END IF;
      EXIT WHEN at IS NULL OR since[at] IS NULL;
      lane_id := given.lanes[at];
      IF NOT pg_try_advisory_xact_lock(1903519026, lane_id) THEN
        since[at] := NULL;
        claim_id := NULL;
        RETURN NEXT;
        CONTINUE;
      END IF;
      share := least(share, wants[request]);
      IF cardinality(since) > 1 AND other IS NOT NULL AND share > 1 THEN
        share := rota.queue_turn_frames(lane_id, share, other);
      END IF;
      taken := rota.queue_take(lane_id, share, by, given.in_turns,
                               cardinality(array_remove(since, NULL)) > 1);
      IF taken.claim_id IS NULL THEN
        since[at] := NULL;
        CONTINUE;
      END IF;
      claims_left := claims_left - 1;
      wants[request] := wants[request] - taken.n + coalesce(bit_count(taken.skipped), 0);
      RETURN QUERY SELECT request, lane_id, taken.claim_id, taken.n, taken.first_seq, taken.skipped, p.sizes, p.jobs,
                          p.layers, p.frames, p.attempts, p.payloads
                   FROM (SELECT (taken.pieces).*) AS p;
      IF cardinality(since) > 1 AND wants[request] > 0 THEN
        since[at] := rota.queue_turn_since(lane_id);
      END IF;
    END LOOP;
    EXIT WHEN claims_left <= 0;
  END LOOP;
END $$;

COMMENT ON FUNCTION rota.queue_claim_each IS
  'Claim waiting positions for several requests. Returns a row per claim; the arrays are in the order of its positions.'
  ' A row without a claim stands for a lane that is locked.';

-- For one request; called by servers of earlier versions.
CREATE OR REPLACE FUNCTION rota.queue_claim(lanes integer[], want integer, by bigint)
RETURNS TABLE (
  lane_id integer, claim_id bigint, n integer, first_seq bigint, skipped varbit,
  sizes integer[], jobs uuid[], layers uuid[], frames integer[], attempts smallint[], payloads bytea[]
)
LANGUAGE sql AS $$
  SELECT c.lane_id, c.claim_id, c.n, c.first_seq, c.skipped, c.sizes, c.jobs, c.layers, c.frames, c.attempts, c.payloads
  FROM rota.queue_claim_each(lanes, array_fill(1, ARRAY[cardinality(lanes)]), ARRAY[want], by) AS c
  WHERE c.claim_id IS NOT NULL
$$;

COMMENT ON FUNCTION rota.queue_claim IS
  'Claim up to `want` waiting positions. Returns a row per claim; the arrays are in the order of its positions.';

-- Ends positions. Only open ones are ended, each once; other requested bits are missing from `closed`. A claim that is
-- not in the slot of its number was carried to slot 7, or has ended and was pruned.
CREATE OR REPLACE FUNCTION rota.queue_close(how integer, ids bigint[], masks varbit[]) RETURNS rota.queue_closed[]
LANGUAGE plpgsql AS $$
DECLARE
  ended rota.queue_closed[] := '{}';
  more rota.queue_closed[];
  slots integer[];
BEGIN
  PERFORM rota.queue_read_committed();
  PERFORM pg_advisory_xact_lock(1903519027, key) FROM (
    SELECT DISTINCT (id & 2147483647)::integer AS key FROM unnest(ids) AS id ORDER BY key) AS sorted;
  slots := ARRAY(SELECT DISTINCT id % 8 FROM unnest(ids) AS id ORDER BY 1);
  IF cardinality(slots) = 1 THEN
    ended := rota.queue_close_in(slots[1], how, ids, masks);
  ELSE
    FOR at IN 1 .. cardinality(slots) LOOP
      SELECT rota.queue_close_in(slots[at], how, array_agg(u.id), array_agg(u.mask)) INTO more
      FROM unnest(ids, masks) AS u (id, mask) WHERE u.id % 8 = slots[at];
      ended := ended || more;
    END LOOP;
  END IF;
  IF cardinality(ended) < cardinality(ids) THEN
    SELECT rota.queue_close_in(7, how, array_agg(u.id), array_agg(u.mask)) INTO more
    FROM unnest(ids, masks) AS u (id, mask)
    WHERE u.id % 8 < 7 AND u.id <> ALL (ARRAY(SELECT e.claim_id FROM unnest(ended) AS e));
    ended := ended || more;
  END IF;
  RETURN ended;
END $$;

CREATE OR REPLACE FUNCTION rota.queue_close_in(slot integer, how integer, ids bigint[], masks varbit[])
RETURNS rota.queue_closed[]
LANGUAGE plpgsql AS $$
DECLARE
  ended rota.queue_closed[];
BEGIN
  EXECUTE format(
    'SELECT coalesce(array_agg(ROW(%1$s, c.claim_id, c.lane_id, c.first_seq, c.closed)::rota.queue_closed), ''{}'')'
    ' FROM rota.queue_close_%1$s($1, $2, $3) AS c', slot) INTO ended USING how, ids, masks;
  RETURN ended;
END $$;

-- Requested bits that were refused: the position had ended before, or its claim is unknown.
CREATE OR REPLACE FUNCTION rota.queue_refused(ids bigint[], masks varbit[], ended rota.queue_closed[])
RETURNS TABLE (claim_id bigint, refused varbit)
LANGUAGE sql IMMUTABLE AS $$
  SELECT u.id, CASE WHEN e.claim_id IS NULL THEN u.mask
                    ELSE u.mask & ~rota.queue_mask(e.closed, length(u.mask)) END
  FROM unnest(ids, masks) AS u (id, mask) LEFT JOIN unnest(ended) AS e ON e.claim_id = u.id
  WHERE bit_count(u.mask) > coalesce(bit_count(e.closed), 0)
$$;

-- The success path.
CREATE OR REPLACE FUNCTION rota.insert_done_rows_tx(ids bigint[], masks varbit[])
RETURNS TABLE (claim_id bigint, refused varbit)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  ended rota.queue_closed[] := rota.queue_close(1, ids, masks);
  one rota.queue_closed := ended[1];
  n bigint := bit_count(one.closed);
  counted boolean := false;
BEGIN
  -- Most batches are one claim. Counting it in one statement costs half of grouping and `queue_count`.
  IF cardinality(ended) = 1 THEN
    INSERT INTO rota.queue_terminal_count_deltas
    SELECT t.last_value % 4, one.ready_slot, one.lane_id, 0, -n, n, 0, 0, 0, 0
    FROM rota.queue_delta_turn AS t, rota.queue_storage AS s WHERE s.counter_mode = 'ledger' AND n > 0;
    counted := FOUND;
  END IF;
  IF NOT counted THEN
    PERFORM rota.queue_count_each(array_agg(d.ready_slot), array_agg(d.lane_id), running => array_agg(-d.n),
                                  completed => array_agg(d.n))
    FROM (SELECT e.lane_id, e.ready_slot, sum(bit_count(e.closed))::bigint AS n
          FROM unnest(ended) AS e GROUP BY 1, 2) AS d
    WHERE d.n > 0;
  END IF;
  RETURN QUERY SELECT * FROM rota.queue_refused(ids, masks, ended);
END $$;

COMMENT ON FUNCTION rota.insert_done_rows_tx IS
  'Complete positions. Returns a row per claim with refused positions; no row means that all were accepted.';

-- A claim that is not in the slot of its number was carried to slot 7; a pruned one yields nothing.
CREATE OR REPLACE FUNCTION rota.queue_look(ids bigint[], masks varbit[])
RETURNS TABLE (token bigint, job_id uuid, layer_id uuid, frame integer, attempt smallint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  found_turns rota.queue_closed[] := '{}';
  more rota.queue_closed[];
  slot integer;
BEGIN
  FOR slot IN SELECT DISTINCT s FROM (SELECT id % 8 AS s FROM unnest(ids) AS id UNION SELECT 7) AS slots ORDER BY 1 LOOP
    EXECUTE format($q$
      SELECT array_agg(ROW(%1$s, c.claim_id, c.lane_id, c.last_seq - c.n + 1, rota.queue_mask(u.mask, c.n))::rota.queue_closed)
      FROM unnest($1, $2) AS u (id, mask) JOIN rota.queue_claims_%1$s c ON c.claim_id = u.id
    $q$, slot) INTO more USING ids, masks;
    found_turns := found_turns || coalesce(more, '{}');
  END LOOP;
  RETURN QUERY SELECT t.token, t.job_id, t.layer_id, t.frame, t.attempt FROM rota.queue_turns(found_turns) AS t;
END $$;

COMMENT ON FUNCTION rota.queue_look IS 'Job, layer, frame and attempt of claimed positions.';
