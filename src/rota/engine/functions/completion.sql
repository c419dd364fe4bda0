-- The newest `most` jobs before `before`, live and done, of these shows (null: all), by an index in either case.
CREATE OR REPLACE FUNCTION rota.jobs_before(shows uuid[], before uuid, most integer) RETURNS TABLE (
  pk_job uuid, pk_show uuid, str_name text, topic text, priority smallint, state text, reason text, labels jsonb,
  ts_submitted timestamptz, ts_finished timestamptz, layers rota.layer[]
) LANGUAGE plpgsql STABLE AS $$
DECLARE
  latest uuid := coalesce(before, 'ffffffff-ffff-ffff-ffff-ffffffffffff');
BEGIN
  IF shows IS NULL THEN
    RETURN QUERY
    (SELECT j.pk_job, j.pk_show, j.str_name, j.topic, j.priority, j.state, j.reason, j.labels, j.ts_submitted,
            NULL::timestamptz, NULL::rota.layer[]
     FROM rota.job j WHERE j.pk_job < latest ORDER BY j.pk_job DESC LIMIT most)
    UNION ALL
    (SELECT d.pk_job, d.pk_show, d.str_name, d.topic, d.priority, d.state, d.reason, d.labels, d.ts_submitted,
            d.ts_finished, d.layers
     FROM rota.job_done d WHERE d.pk_job < latest ORDER BY d.pk_job DESC LIMIT most)
    ORDER BY 1 DESC LIMIT most;
  ELSE
    RETURN QUERY
    SELECT f.* FROM unnest(shows) AS s (pk_show) CROSS JOIN LATERAL (
      (SELECT j.pk_job, j.pk_show, j.str_name, j.topic, j.priority, j.state, j.reason, j.labels, j.ts_submitted,
              NULL::timestamptz, NULL::rota.layer[]
       FROM rota.job j WHERE j.pk_show = s.pk_show AND j.pk_job < latest ORDER BY j.pk_job DESC LIMIT most)
      UNION ALL
      (SELECT d.pk_job, d.pk_show, d.str_name, d.topic, d.priority, d.state, d.reason, d.labels, d.ts_submitted,
              d.ts_finished, d.layers
       FROM rota.job_done d WHERE d.pk_show = s.pk_show AND d.pk_job < latest ORDER BY d.pk_job DESC LIMIT most)
    ) AS f ORDER BY 1 DESC LIMIT most;
  END IF;
END $$;

CREATE OR REPLACE FUNCTION rota.now_ms() RETURNS bigint
LANGUAGE sql AS $$ SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint $$;

-- Counts ended frames at their layers. Returns the jobs of layers without remaining frames. Layers are updated in the
-- order of their ids, so that two batches cannot deadlock: hence the forced access path. They are found by an array of
-- ids: a nested loop could begin with all layers, if the plan was made while the table was almost empty.
CREATE OR REPLACE FUNCTION rota.layers_count(layers uuid[], numbers integer[], ending text, took bigint) RETURNS uuid[]
LANGUAGE plpgsql
SET enable_nestloop = off SET enable_mergejoin = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
  ended uuid[];
BEGIN
  WITH counted AS (
    UPDATE rota.layer l SET
      succeeded   = l.succeeded   + CASE WHEN ending = 'SUCCEEDED' THEN d.n ELSE 0 END,
      quarantined = l.quarantined + CASE WHEN ending = 'OUTPUT_QUARANTINED' THEN d.n ELSE 0 END,
      failed      = l.failed      + CASE WHEN ending = 'FAILED' THEN d.n ELSE 0 END,
      timed_out   = l.timed_out   + CASE WHEN ending = 'TIMEOUT' THEN d.n ELSE 0 END,
      cancelled   = l.cancelled   + CASE WHEN ending = 'CANCELLED' THEN d.n ELSE 0 END,
      denied      = l.denied      + CASE WHEN ending = 'DENIED' THEN d.n ELSE 0 END,
      took_ms     = l.took_ms + took * d.n / d.total
    FROM (SELECT u.layer, sum(u.n)::integer AS n, (sum(sum(u.n)) OVER ())::bigint AS total
          FROM unnest(layers, numbers) AS u (layer, n) WHERE u.n > 0 GROUP BY 1 ORDER BY 1) AS d
    WHERE l.pk_layer = d.layer AND l.pk_layer = ANY (layers)
    RETURNING l.pk_job,
      l.succeeded + l.quarantined + l.failed + l.timed_out + l.cancelled + l.denied = l.frames AS done
  ) SELECT array_agg(DISTINCT c.pk_job) INTO ended FROM counted AS c WHERE c.done;
  RETURN coalesce(ended, '{}');
END $$;

-- Continues jobs that wait for ended jobs. A job whose last edge is removed goes to admission like a new one; one whose
-- edge stays is marked as ending, and the leader ends it. Both happen in the transaction of the end, so none is missed.
-- Waiting jobs are locked in the order of their ids, after those they wait for, which are older.
-- A job whose output is held counts as ended once it was scanned (ADR 20): settling its last scan calls this again.
CREATE OR REPLACE FUNCTION rota.jobs_release(ended uuid[]) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
  waiting uuid[];
  freed uuid[];
BEGIN
  DELETE FROM rota.job_after a WHERE a.pk_job = ANY (ended);
  ended := ARRAY(SELECT e FROM unnest(ended) AS e
                 WHERE NOT EXISTS (SELECT FROM rota.scan s WHERE s.pk_job = e AND s.mode <> 'pass'));
  waiting := ARRAY(SELECT j.pk_job FROM rota.job j
                   WHERE j.pk_job IN (SELECT a.pk_job FROM rota.job_after a WHERE a.pk_before = ANY (ended))
                   ORDER BY j.pk_job FOR UPDATE);
  IF cardinality(waiting) = 0 THEN
    RETURN 0;
  END IF;

  DELETE FROM rota.job_after a
  WHERE a.pk_before = ANY (ended) AND a.pk_job = ANY (waiting)
    AND (a.if_failed = 'run' OR EXISTS (SELECT FROM rota.job_done d WHERE d.pk_job = a.pk_before AND d.state = 'SUCCEEDED'));
  UPDATE rota.job j SET
    ends_as = CASE a.if_failed WHEN 'fail' THEN 'FAILED' ELSE 'CANCELLED' END, reason = 'job_before_failed',
    ts_updated = clock_timestamp()
  FROM (SELECT DISTINCT ON (a.pk_job) a.pk_job, a.if_failed FROM rota.job_after a
        WHERE a.pk_before = ANY (ended) AND a.pk_job = ANY (waiting) ORDER BY a.pk_job) AS a
  WHERE j.pk_job = a.pk_job AND j.ends_as IS NULL;

  WITH moved AS (
    UPDATE rota.job j SET reason = 'policy_pending', ts_updated = clock_timestamp()
    WHERE j.pk_job = ANY (waiting) AND j.state = 'PENDING' AND j.ends_as IS NULL
      AND NOT EXISTS (SELECT FROM rota.job_after a WHERE a.pk_job = j.pk_job)
    RETURNING j.pk_job
  ) SELECT array_agg(m.pk_job) INTO freed FROM moved AS m;
  IF freed IS NOT NULL THEN
    -- A msgpack list of ids, as `rota.engine.admission.decision.admission_message` writes it.
    INSERT INTO rota.outbox (subject, msg_id, payload)
    SELECT 'sys.job.gate', 'gate:' || gen_random_uuid(), '\xdd'::bytea || int4send(cardinality(freed))
           || string_agg('\xd924'::bytea || convert_to(id::text, 'UTF8'), ''::bytea)
    FROM unnest(freed) AS id;
    PERFORM pg_notify('rota_outbox', '');
  END IF;
  RETURN cardinality(waiting);
END $$;

-- Makes jobs wait for others, which must exist; edges to ended jobs are omitted.
CREATE OR REPLACE FUNCTION rota.jobs_wait(jobs uuid[], befores uuid[], ifs_failed text[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO rota.job_after (pk_before, pk_job, if_failed)
  SELECT DISTINCT given.before, given.job, given.if_failed
  FROM unnest(jobs, befores, ifs_failed) AS given (job, before, if_failed)
  JOIN rota.job j ON j.pk_job = given.job
  ORDER BY 1, 2;
  PERFORM rota.jobs_release(ARRAY(SELECT DISTINCT b FROM unnest(befores) AS b
                                  WHERE NOT EXISTS (SELECT FROM rota.job j WHERE j.pk_job = b)));
END $$;

-- The rows of `jobs_finish`. They are found by arrays of ids, as in `jobs_succeed`.
CREATE OR REPLACE FUNCTION rota.jobs_move_finished(jobs uuid[], because text)
RETURNS SETOF rota.job_ended
LANGUAGE plpgsql
SET enable_nestloop = off SET enable_mergejoin = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
BEGIN
  PERFORM FROM rota.job j WHERE j.pk_job = ANY (jobs) AND j.int_layers > 1 ORDER BY j.pk_job FOR UPDATE;
  RETURN QUERY
  WITH ended AS (
    DELETE FROM rota.job j
    WHERE j.pk_job = ANY (jobs) AND (j.int_layers = 1 OR NOT EXISTS (
      SELECT FROM rota.layer l WHERE l.pk_job = j.pk_job
        AND l.succeeded + l.quarantined + l.failed + l.timed_out + l.cancelled + l.denied < l.frames OFFSET 0))
    RETURNING j.*
  ), gone AS (
    DELETE FROM rota.layer l WHERE l.pk_job = ANY (ARRAY(SELECT e.pk_job FROM ended e)) RETURNING l.*
  ), told AS (
    SELECT g.pk_job, array_agg(g::rota.layer ORDER BY g.number) AS layers,
      CASE WHEN sum(g.denied) > 0 THEN 'DENIED' WHEN sum(g.cancelled) > 0 THEN 'CANCELLED'
           WHEN sum(g.timed_out) > 0 THEN 'TIMEOUT' WHEN sum(g.failed) > 0 THEN 'FAILED'
           WHEN sum(g.quarantined) > 0 THEN 'OUTPUT_QUARANTINED' ELSE 'SUCCEEDED' END AS state
    FROM gone AS g GROUP BY 1
  )
  INSERT INTO rota.job_done AS d
  SELECT e.pk_job, e.pk_show, e.pk_folder, e.pk_dept, e.str_name, e.topic, e.priority, t.state,
         coalesce(because, e.reason), e.labels, e.request, e.workflow_id, e.ts_submitted, e.ts_deadline, now(),
         -- Frames handed to a worker were DISPATCHED, even if that state was not written in time.
         e.history || CASE WHEN e.state = 'SCHEDULED' AND t.state IN ('SUCCEEDED', 'OUTPUT_QUARANTINED')
                           THEN jsonb_build_array(jsonb_build_array('DISPATCHED', rota.now_ms(), NULL)) ELSE '[]' END
                   || jsonb_build_array(jsonb_build_array(t.state, rota.now_ms(), coalesce(because, e.reason))),
         t.layers, e.word
  FROM ended e JOIN told t ON t.pk_job = e.pk_job
  RETURNING d.pk_job, d.pk_show, d.topic, d.state, d.workflow_id;
END $$;

-- The only way in which a job ends. Those of `jobs` all of whose frames have ended move to job_done, in the worst of
-- these end states; the others are left alone. A job of several layers is checked under its lock: of two transactions
-- that end its last layers concurrently, the second sees both.
CREATE OR REPLACE FUNCTION rota.jobs_finish(jobs uuid[], because text DEFAULT NULL)
RETURNS SETOF rota.job_ended
LANGUAGE plpgsql AS $$
BEGIN
  RETURN QUERY SELECT * FROM rota.jobs_move_finished(jobs, because);
  -- Check whole tables first, since usually no job waits for another.
  IF EXISTS (SELECT FROM rota.approval WHERE state = 'pending') THEN
    PERFORM rota.approvals_close('job', ARRAY(SELECT b::text FROM unnest(jobs) AS b
                                              WHERE NOT EXISTS (SELECT FROM rota.job j WHERE j.pk_job = b)));
  END IF;
  IF EXISTS (SELECT FROM rota.job_after) THEN
    PERFORM rota.jobs_release(ARRAY(SELECT b FROM unnest(jobs) AS b
                                    WHERE NOT EXISTS (SELECT FROM rota.job j WHERE j.pk_job = b)));
  END IF;
END $$;

-- Jobs all of whose frames succeed in one batch, mostly jobs of one frame: they move immediately, without counting at a
-- layer that is deleted too. Returns these jobs; `layers_count` handles the layers of the others.
CREATE OR REPLACE FUNCTION rota.jobs_succeed(layers uuid[], numbers integer[])
RETURNS SETOF rota.job_ended
LANGUAGE plpgsql
-- Rows are found by arrays of ids and in subqueries that cannot be pulled up (OFFSET 0): a join could begin with all
-- jobs, if the plan was made while the table was almost empty.
SET enable_nestloop = off SET enable_mergejoin = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
  ended_ms bigint := rota.now_ms();
  last jsonb := jsonb_build_array(jsonb_build_array('SUCCEEDED', ended_ms, NULL));
  last_two jsonb := jsonb_build_array(jsonb_build_array('DISPATCHED', ended_ms, NULL)) || last;
  -- Layers of several frames all of which are among these; those of one frame are checked as they are deleted.
  several uuid[] := ARRAY(
    SELECT u.layer FROM unnest(layers, numbers) AS u (layer, n)
    WHERE u.n > 1 AND EXISTS (SELECT FROM rota.layer f WHERE f.pk_layer = u.layer AND f.frames = u.n OFFSET 0));
BEGIN
  RETURN QUERY
  WITH whole AS (
    DELETE FROM rota.layer l
    WHERE l.pk_layer = ANY (several || ARRAY(SELECT u.layer FROM unnest(layers, numbers) AS u (layer, n) WHERE u.n = 1))
      AND (l.frames = 1 OR l.pk_layer = ANY (several))
      AND EXISTS (SELECT FROM rota.job j WHERE j.pk_job = l.pk_job AND j.int_layers = 1 OFFSET 0)
    RETURNING l.*
  ), ended AS (
    DELETE FROM rota.job j WHERE j.pk_job = ANY (ARRAY(SELECT w.pk_job FROM whole w)) RETURNING j.*
  )
  INSERT INTO rota.job_done AS d
  SELECT e.pk_job, e.pk_show, e.pk_folder, e.pk_dept, e.str_name, e.topic, e.priority, 'SUCCEEDED', NULL, e.labels,
         e.request, e.workflow_id, e.ts_submitted, e.ts_deadline, now(),
         -- An empty history implies these two entries: see `job_history_shown`.
         CASE WHEN e.state <> 'SCHEDULED' THEN e.history || last
              WHEN e.history = '[]' THEN e.history ELSE e.history || last_two END,
         ARRAY[ROW(w.pk_layer, w.pk_job, w.number, w.str_name, w.queue, w.work, w.input, w.input_at, w.first_frame,
                   w.frame_step, w.ranges, w.items, w.capped, w.frames, w.frames, w.quarantined, w.failed,
                   w.timed_out, w.cancelled, w.denied, w.took_ms)::rota.layer],
         e.word
  FROM ended e JOIN whole w ON w.pk_job = e.pk_job
  RETURNING d.pk_job, d.pk_show, d.topic, d.state, d.workflow_id;
END $$;

-- The success path: frames without a result, all of one worker. This one statement ends them completely. Frames of a
-- locked show are ended later (`rota.accounting.show_isolation`): those of other shows must not wait for it.
CREATE OR REPLACE FUNCTION rota.frames_succeed_each(
  hosts uuid[], ids bigint[], masks varbit[], firsts bigint[], lasts bigint[], took bigint
) RETURNS SETOF rota.frame_told
LANGUAGE plpgsql SET lock_timeout = '500ms'
-- Planned once per session: with arrays of known length each of its statements, and of those that it calls, would be
-- planned in the first calls or in every one. Rows are found by their keys, whatever the size of a table was then.
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
DECLARE
  asked bigint;
  held bigint;
  shows uuid[];
  late bigint[] := '{}';
  of_show uuid;
  told rota.frame_told;
  freed rota.proc_ended[];
  finished rota.job_ended[];
  row record;
  layers uuid[] := '{}';
  numbers integer[] := '{}';
BEGIN
  SELECT sum(run.last - run.first + 1) INTO asked FROM unnest(firsts, lasts) AS run (first, last);
  -- Range by range: a hash join would read all bookings for each batch.
  SELECT coalesce(sum(p.n), 0), array_agg(DISTINCT p.pk_show ORDER BY p.pk_show) INTO held, shows
  FROM unnest(hosts, firsts, lasts) AS run (host, first, last)
  CROSS JOIN LATERAL (
    SELECT p.pk_show, count(*) AS n FROM rota.proc p
    WHERE p.token BETWEEN run.first AND run.last AND p.pk_host = run.host GROUP BY 1) AS p;
  IF held < asked THEN
    -- Late, duplicate or foreign: the caller handles the remaining tokens separately.
    told.what := 'not_held';
    told.tokens := ARRAY(SELECT p.token FROM unnest(hosts, firsts, lasts) AS run (host, first, last)
                         JOIN rota.proc p ON p.token BETWEEN run.first AND run.last WHERE p.pk_host = run.host);
    RETURN NEXT told;
    RETURN;
  END IF;

  FOR row IN SELECT * FROM rota.insert_done_rows_tx(ids, masks) LOOP
    told.what := 'refused';
    told.claim_id := row.claim_id;
    told.refused := row.refused;
    late := late || ARRAY(SELECT row.claim_id * 512 + i FROM generate_series(0, length(row.refused) - 1) AS i
                          WHERE get_bit(row.refused, i) = 1);
    RETURN NEXT told;
  END LOOP;

  -- Frames of one claim run on several workers: without the workers their ranges are one range, and one tombstone.
  SELECT array_agg(lower(run)), array_agg(upper(run) - 1) INTO firsts, lasts
  FROM unnest((SELECT range_agg(int8range(r.first, r.last, '[]')) FROM unnest(firsts, lasts) AS r (first, last))) AS run;
  FOREACH of_show IN ARRAY coalesce(shows, '{}') LOOP
    freed := ARRAY(SELECT e FROM rota.proc_end(of_show, firsts, lasts) AS e);
    -- Rows without a charge are frames of a series: Redis does not know them.
    RETURN QUERY
      SELECT 'released', NULL::bigint, NULL::varbit, of_show, f.managed, f.fence, f.pk_alloc, f.pk_folder, f.pk_dept,
             f.cores, f.gpus, ARRAY[f.pk_job], ARRAY[f.pk_layer], f.tokens, NULL::text, NULL::text, NULL::text
      FROM unnest(freed) AS f WHERE cardinality(f.tokens) > 1 AND (f.cores > 0 OR f.gpus > 0)
      UNION ALL
      SELECT 'singles', NULL, NULL, of_show, f.managed, f.fence, f.pk_alloc, f.pk_folder, f.pk_dept, f.cores, f.gpus,
             array_agg(f.pk_job), array_agg(f.pk_layer), array_agg(f.tokens[1]), NULL, NULL, NULL
      FROM unnest(freed) AS f WHERE cardinality(f.tokens) = 1 AND (f.cores > 0 OR f.gpus > 0) GROUP BY 5, 6, 7, 8, 9, 10, 11;
    SELECT layers || array_agg(d.layer), numbers || array_agg(d.n) INTO layers, numbers
    FROM (SELECT f.pk_layer AS layer, sum(CASE WHEN cardinality(late) = 0 THEN cardinality(f.ended)
                   ELSE (SELECT count(*) FROM unnest(f.ended) AS t WHERE t <> ALL (late)) END)::integer AS n
          FROM unnest(freed) AS f GROUP BY 1) AS d;
  END LOOP;

  finished := ARRAY(SELECT j FROM rota.jobs_succeed(layers, numbers) AS j);
  IF cardinality(finished) > 0 AND EXISTS (SELECT FROM rota.job_after) THEN
    PERFORM rota.jobs_release(ARRAY(SELECT j.pk_job FROM unnest(finished) AS j));
  END IF;
  IF cardinality(finished) < cardinality(layers) THEN
    finished := finished || ARRAY(
      SELECT j FROM rota.jobs_finish(rota.layers_count(layers, numbers, 'SUCCEEDED', took)) AS j);
  END IF;
  RETURN QUERY
    SELECT 'finished', NULL::bigint, NULL::varbit, j.pk_show, NULL::boolean, NULL::bigint, NULL::uuid, NULL::uuid,
           NULL::uuid, NULL::bigint, NULL::bigint, array_agg(j.pk_job), NULL::uuid[], NULL::bigint[], j.topic, j.state,
           j.workflow_id
    FROM unnest(finished) AS j GROUP BY j.pk_show, j.topic, j.state, j.workflow_id;
END $$;

COMMENT ON FUNCTION rota.frames_succeed_each IS
  'Complete frames that returned no result, ranges of tokens with a worker each: closures, procs, counts and jobs.';

-- The same for frames with a result each, which nothing checks: `token_list` and what follows it are in one order.
CREATE OR REPLACE FUNCTION rota.frames_succeed_with_results(
  hosts uuid[], ids bigint[], masks varbit[], firsts bigint[], lasts bigint[], took bigint,
  token_list bigint[], result_values bytea[], pointers text[], times integer[]
) RETURNS SETOF rota.frame_told
LANGUAGE plpgsql SET lock_timeout = '500ms'
-- Rows are found by token: a plan that was made while the tables were almost empty must not read them whole.
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_mergejoin = off
AS $$
DECLARE
  told rota.frame_told;
  of_layers uuid[];
  of_hosts uuid[];
  late bigint[] := '{}';
BEGIN
  -- Before the end deletes these rows.
  SELECT array_agg(p.pk_layer ORDER BY u.i), array_agg(p.pk_host ORDER BY u.i) INTO of_layers, of_hosts
  FROM unnest(token_list) WITH ORDINALITY AS u (token, i)
  LEFT JOIN LATERAL (SELECT p.pk_layer, p.pk_host FROM rota.proc p WHERE p.token = u.token OFFSET 0) AS p ON true;
  FOR told IN SELECT * FROM rota.frames_succeed_each(hosts, ids, masks, firsts, lasts, took) LOOP
    RETURN NEXT told;
    IF told.what = 'not_held' THEN
      RETURN;
    ELSIF told.what = 'refused' THEN
      late := late || ARRAY(SELECT told.claim_id * 512 + i FROM generate_series(0, length(told.refused) - 1) AS i
                            WHERE get_bit(told.refused, i) = 1);
    END IF;
  END LOOP;
  INSERT INTO rota.frame_end (pk_layer, frame, attempt, token, state, value, value_at, took_ms, pk_host)
  SELECT r.layer, coalesce(f.frame, 0), coalesce(f.attempt, 1), r.token, 'SUCCEEDED', r.value, r.pointer, r.took_ms, r.host
  FROM unnest(token_list, result_values, pointers, times, of_layers, of_hosts)
    AS r (token, value, pointer, took_ms, layer, host)
  LEFT JOIN rota.queue_look(ids, masks) AS f ON f.token = r.token
  WHERE r.token <> ALL (late);
END $$;

COMMENT ON FUNCTION rota.frames_succeed_with_results IS
  'Complete frames with a result each: as frames_succeed_each, and a row in frame_end.';

-- For servers of an older version.
CREATE OR REPLACE FUNCTION rota.frames_succeed(
  host uuid, ids bigint[], masks varbit[], firsts bigint[], lasts bigint[], took bigint
) RETURNS SETOF rota.frame_told
LANGUAGE sql AS $$
  SELECT * FROM rota.frames_succeed_each(array_fill(host, ARRAY[cardinality(firsts)]), ids, masks, firsts, lasts, took)
$$;
