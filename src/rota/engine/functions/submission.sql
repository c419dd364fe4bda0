CREATE OR REPLACE FUNCTION rota.job_places(
  shows text[], folders text[], depts text[], digests bytea[], priorities smallint[]
) RETURNS rota.job_place[]
LANGUAGE plpgsql STABLE SET plan_cache_mode = force_generic_plan AS $$
BEGIN
  RETURN (SELECT array_agg(ROW(s.pk_show, f.pk_folder, d.pk_dept, q.queue, given.priority, CASE
    WHEN s.pk_show IS NULL THEN 'unknown_show'
    WHEN f.pk_folder IS NULL THEN 'unknown_folder'
    WHEN d.pk_dept IS NULL THEN 'unknown_dept'
    WHEN q.queue IS NULL OR NOT EXISTS (
      SELECT FROM rota.queue_lanes l WHERE l.queue = q.queue AND l.priority = given.priority) THEN 'new_queue'
    END)::rota.job_place ORDER BY given.at)
  FROM unnest(shows, folders, depts, digests, priorities) WITH ORDINALITY
    AS given (show, folder, dept, digest, priority, at)
  LEFT JOIN rota.show s ON s.str_name = given.show
  LEFT JOIN rota.folder f ON f.pk_show = s.pk_show AND f.str_name = given.folder
  LEFT JOIN rota.dept d ON d.str_name = given.dept
  LEFT JOIN rota.placement_class c ON c.digest = given.digest
  LEFT JOIN rota.queue_class q
    ON q.pk_show = s.pk_show AND q.pk_folder = f.pk_folder AND q.pk_dept = d.pk_dept AND q.class_id = c.class_id);
END $$;

-- The queue of a show, folder, department and placement class; both are created if they are new.
CREATE OR REPLACE FUNCTION rota.job_queue(
  of_show text, of_folder text, of_dept text, of_digest bytea, of_topic text, of_requires text[], of_labels jsonb,
  of_pool text, of_worker text, of_cores bigint, of_gpus integer, of_memory_mb bigint
) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
  place rota.job_place := (rota.job_places(ARRAY[of_show], ARRAY[of_folder], ARRAY[of_dept], ARRAY[of_digest],
                                           ARRAY[1::smallint]))[1];
  class integer;
  name text;
BEGIN
  IF place.queue IS NOT NULL OR place.fault LIKE 'unknown%' THEN
    RETURN place.queue;
  END IF;
  INSERT INTO rota.placement_class (digest, topic, requires, labels, preferred_pool, preferred_worker, cores, gpus,
                                    memory_mb)
  VALUES (of_digest, of_topic, of_requires, of_labels, of_pool, of_worker, of_cores, of_gpus, of_memory_mb)
  ON CONFLICT DO NOTHING;
  SELECT c.class_id INTO class FROM rota.placement_class c WHERE c.digest = of_digest;
  -- A name that another department or an earlier show of this name has taken gets a unique suffix.
  name := format('%s#%s', left(format('%s/%s/%s', of_show, of_folder, of_topic), 150), class);
  INSERT INTO rota.queue_class VALUES (name, place.pk_show, place.pk_folder, place.pk_dept, class)
  ON CONFLICT DO NOTHING;
  INSERT INTO rota.queue_class
  VALUES (format('%s-%s', name, left(md5(format('%s%s%s', place.pk_show, place.pk_folder, place.pk_dept)), 12)),
          place.pk_show, place.pk_folder, place.pk_dept, class)
  ON CONFLICT DO NOTHING;
  RETURN (SELECT q.queue FROM rota.queue_class q
          WHERE (q.pk_show, q.pk_folder, q.pk_dept, q.class_id) = (place.pk_show, place.pk_folder, place.pk_dept, class));
END $$;

-- Transitions of a job up to its first queueing, for rota.job.history. PENDING and SCHEDULED at the time of submission
-- are not stored: `job_history_shown` adds them. A single expression, so that it is inlined.
CREATE OR REPLACE FUNCTION rota.job_history(state text, reason text, at timestamptz) RETURNS jsonb
LANGUAGE sql STABLE AS $$
  SELECT CASE WHEN state = 'SCHEDULED' AND reason IS NULL THEN '[]' WHEN state = 'PENDING'
    THEN jsonb_build_array(jsonb_build_array('PENDING', floor(extract(epoch FROM at) * 1000)::bigint, reason))
    ELSE jsonb_build_array(jsonb_build_array('PENDING', floor(extract(epoch FROM at) * 1000)::bigint, NULL),
                           jsonb_build_array(state, floor(extract(epoch FROM at) * 1000)::bigint, reason)) END
$$;

-- Queue entries in the order of their lanes, the same as in the queue's own client, so that submitters to many queues
-- cannot deadlock. Entries with a future time are deferred.
CREATE OR REPLACE FUNCTION rota.job_enqueue(
  places rota.job_place[], of_places integer[], jobs uuid[], layers uuid[], frames integer[], counts integer[],
  payloads bytea[], run_ats timestamptz[]
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
  moment timestamptz := clock_timestamp();
  n integer := cardinality(jobs);
  batch record;
BEGIN
  IF cardinality(places) = 1 AND run_ats IS NULL THEN
    PERFORM rota.queue_enqueue(ARRAY[places[1].queue], ARRAY[places[1].priority], ARRAY[NULL::text], ARRAY[n],
                               jobs, layers, frames, counts, array_fill(1::smallint, ARRAY[n]), payloads, true);
    RETURN;
  END IF;

  FOR batch IN
    SELECT e.later, array_agg(e.queue) AS queues, array_agg(e.priority) AS priorities, array_agg(e.run_at) AS run_ats,
           array_agg(e.job) AS jobs, array_agg(e.layer) AS layers, array_agg(e.frame) AS frames,
           array_agg(e.n) AS counts, array_agg(1::smallint) AS attempts, array_agg(e.payload) AS payloads
    FROM (
      SELECT p.queue, p.priority, coalesce(given.run_at > moment, false) AS later, given.*
      FROM unnest(of_places, jobs, layers, frames, counts, payloads, run_ats) WITH ORDINALITY
        AS given (place, job, layer, frame, n, payload, run_at, at)
      JOIN unnest(places) WITH ORDINALITY AS p ON p.ordinality = given.place
      ORDER BY later, p.queue COLLATE "C", p.priority, given.at
    ) AS e GROUP BY e.later
  LOOP
    IF batch.later THEN
      PERFORM rota.queue_defer(batch.queues, batch.priorities, batch.run_ats, batch.jobs, batch.layers, batch.frames,
                               batch.counts, batch.attempts, batch.payloads);
    ELSE
      PERFORM rota.queue_enqueue(array_agg(g.queue), array_agg(g.priority), array_agg(NULL::text), array_agg(g.n),
                                 batch.jobs, batch.layers, batch.frames, batch.counts, batch.attempts, batch.payloads, true)
      FROM (SELECT u.queue, u.priority, count(*)::integer AS n
            FROM unnest(batch.queues, batch.priorities) AS u (queue, priority)
            GROUP BY 1, 2 ORDER BY u.queue COLLATE "C", 2) AS g;
    END IF;
  END LOOP;
END $$;

-- The rows of jobs and layers. Values shared by many are passed once (`h_` for jobs, `k_` for layers) and referenced by
-- index. Hash join: the planner does not know the number of distinct ones. Planned once: with arrays of known length it
-- would be planned in every call, which takes longer than to write a job.
CREATE OR REPLACE FUNCTION rota.job_insert(
  places rota.job_place[], moment timestamptz, left_out integer[],
  h_places integer[], h_names text[], h_topics text[], h_priorities smallint[], h_states text[], h_reasons text[],
  h_layers smallint[], h_labels jsonb[], h_requests bytea[], h_deadlines_ms bigint[],
  h_waits_ms bigint[], h_run_ats timestamptz[], h_words integer[],
  k_places integer[], k_numbers smallint[], k_names text[], k_works bytea[], k_firsts integer[], k_steps integer[],
  k_frames integer[], k_ranges text[], k_capped boolean[],
  jobs uuid[], heads integer[], workflows text[],
  layers uuid[], layer_jobs integer[], kinds integer[], inputs bytea[], input_ats text[]
) RETURNS void
LANGUAGE plpgsql SET enable_nestloop = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
  INSERT INTO rota.job (pk_job, pk_show, pk_folder, pk_dept, str_name, topic, priority, state, reason, int_layers,
                        labels, request, workflow_id, ts_submitted, ts_updated, ts_deadline,
                        ts_wait_until, ts_run_at, history, word)
  SELECT given.job, h.pk_show, h.pk_folder, h.pk_dept, h.name, h.topic, h.priority, h.state, h.reason, h.layers,
         h.labels, h.request, given.workflow, moment, moment, h.deadline, h.wait_until, h.run_at, h.history,
         h.word
  FROM unnest(jobs, heads, workflows) WITH ORDINALITY AS given (job, head, workflow, at)
  JOIN (
    SELECT h.*, p.pk_show, p.pk_folder, p.pk_dept, moment + h.deadline_ms * interval '1 ms' AS deadline,
           greatest(moment, h.run_at) + h.wait_ms * interval '1 ms' AS wait_until,
           rota.job_history(h.state, h.reason, moment) AS history
    FROM unnest(h_places, h_names, h_topics, h_priorities, h_states, h_reasons, h_layers, h_labels, h_requests,
                h_deadlines_ms, h_waits_ms, h_run_ats, h_words) WITH ORDINALITY
      AS h (place, name, topic, priority, state, reason, layers, labels, request, deadline_ms, wait_ms, run_at, word,
            head)
    JOIN unnest(places) WITH ORDINALITY AS p ON p.ordinality = h.place
    OFFSET 0  -- once per head, not per job of it
  ) AS h ON h.head = given.head
  WHERE left_out IS NULL OR given.at <> ALL (left_out);

  INSERT INTO rota.layer (pk_layer, pk_job, number, str_name, queue, work, input, input_at, first_frame, frame_step,
                          ranges, capped, frames)
  SELECT given.layer, jobs[given.job], k.number, k.name, k.queue, k.work, given.input, given.input_at, k.first, k.step,
         k.ranges::integer[], k.capped, k.frames
  FROM unnest(layers, layer_jobs, kinds, inputs, input_ats) AS given (layer, job, kind, input, input_at)
  JOIN (
    SELECT k.*, p.queue
    FROM unnest(k_places, k_numbers, k_names, k_works, k_firsts, k_steps, k_frames, k_ranges, k_capped) WITH ORDINALITY
      AS k (place, number, name, work, first, step, frames, ranges, capped, kind)
    JOIN unnest(places) WITH ORDINALITY AS p ON p.ordinality = k.place
  ) AS k ON k.kind = given.kind
  WHERE left_out IS NULL OR given.job <> ALL (left_out);
END $$;

-- Returns a row per item that was not written: a job that existed before, or the reason why the whole call was rejected
-- (then nothing was written). No row means that everything was written.
CREATE OR REPLACE FUNCTION rota.job_submit(
  p_shows text[], p_folders text[], p_depts text[], p_digests bytea[], p_priorities smallint[],
  h_places integer[], h_names text[], h_topics text[], h_priorities smallint[], h_states text[], h_reasons text[],
  h_layers smallint[], h_labels jsonb[], h_requests bytea[], h_deadlines_ms bigint[],
  h_waits_ms bigint[], h_run_ats timestamptz[], h_words bytea[], words_until timestamptz,
  k_places integer[], k_numbers smallint[], k_names text[], k_works bytea[], k_firsts integer[], k_steps integer[],
  k_frames integer[], k_ranges text[], k_capped boolean[],
  jobs uuid[], heads integer[], workflows text[], keys text[], digests bytea[],
  layers uuid[], layer_jobs integer[], kinds integer[], inputs bytea[], input_ats text[],
  e_places integer[], e_jobs uuid[], e_layers uuid[], e_frames integer[], e_counts integer[], e_payloads bytea[],
  e_run_ats timestamptz[],
  c_jobs uuid[], c_layers uuid[], c_places integer[], c_priorities integer[], c_cores bigint[], c_gpus bigint[],
  i_layers uuid[], i_items bytea[]
)
RETURNS SETOF rota.job_unwritten
LANGUAGE plpgsql AS $$
DECLARE
  places rota.job_place[] := rota.job_places(p_shows, p_folders, p_depts, p_digests, p_priorities);
  words integer[];
  moment timestamptz := clock_timestamp();
  known rota.job_unwritten[] := '{}';
  left_out integer[];
BEGIN
  IF EXISTS (SELECT FROM unnest(places) AS p WHERE p.fault IS NOT NULL) THEN
    RETURN QUERY SELECT p.ordinality::integer, p.fault, NULL::uuid, NULL::text
                 FROM unnest(places) WITH ORDINALITY AS p WHERE p.fault IS NOT NULL;
    RETURN;
  END IF;

  IF h_words IS NOT NULL THEN
    words := rota.policy_words(h_words);
    IF EXISTS (SELECT FROM unnest(h_words, words) AS w (digest, word) WHERE w.digest IS NOT NULL AND w.word IS NULL) THEN
      RETURN QUERY SELECT 0, 'new_word', NULL::uuid, NULL::text;
      RETURN;
    END IF;
  END IF;

  IF keys IS NOT NULL THEN
    known := ARRAY(SELECT k FROM rota.job_keys(
      ARRAY(SELECT places[h_places[u.head]].pk_show FROM unnest(heads) WITH ORDINALITY AS u (head, at) ORDER BY u.at),
      keys, jobs, digests) AS k);
    left_out := (SELECT array_agg(k.at) FROM unnest(known) AS k);
    IF left_out IS NOT NULL THEN
      RETURN QUERY SELECT * FROM unnest(known);
      IF EXISTS (SELECT FROM unnest(known) AS k WHERE k.outcome = 'conflict') THEN
        RETURN;
      END IF;
      SELECT array_agg(e.place ORDER BY e.at), array_agg(e.job ORDER BY e.at), array_agg(e.layer ORDER BY e.at),
             array_agg(e.frame ORDER BY e.at), array_agg(e.n ORDER BY e.at), array_agg(e.payload ORDER BY e.at),
             array_agg(e.run_at ORDER BY e.at)
      INTO e_places, e_jobs, e_layers, e_frames, e_counts, e_payloads, e_run_ats
      FROM unnest(e_places, e_jobs, e_layers, e_frames, e_counts, e_payloads, e_run_ats) WITH ORDINALITY
        AS e (place, job, layer, frame, n, payload, run_at, at)
      WHERE e.job <> ALL (ARRAY(SELECT jobs[gone] FROM unnest(left_out) AS gone));
    END IF;
  END IF;

  -- After the last statement that may wait for another transaction: an expired policy decision queues nothing.
  IF clock_timestamp() > words_until THEN
    DELETE FROM rota.idempotency_key k WHERE keys IS NOT NULL AND k.key = ANY (keys) AND k.pk_job = ANY (jobs);
    RETURN QUERY SELECT 0, 'old_word', NULL::uuid, NULL::text;
    RETURN;
  END IF;

  -- The submitter may not know that servers require a policy; PostgreSQL does.
  IF (SELECT g.asks FROM rota.policy_guard g) AND EXISTS (
    SELECT FROM unnest(h_states, words) AS h (state, word) WHERE h.state = 'SCHEDULED' AND h.word IS NULL
  ) THEN
    DELETE FROM rota.idempotency_key k WHERE keys IS NOT NULL AND k.key = ANY (keys) AND k.pk_job = ANY (jobs);
    RETURN QUERY SELECT 0, 'unasked', NULL::uuid, NULL::text;
    RETURN;
  END IF;

  PERFORM rota.job_insert(
    places, moment, left_out, h_places, h_names, h_topics, h_priorities, h_states, h_reasons, h_layers, h_labels,
    h_requests, h_deadlines_ms, h_waits_ms, h_run_ats, words, k_places, k_numbers, k_names, k_works, k_firsts, k_steps,
    k_frames, k_ranges, k_capped, jobs, heads, workflows, layers, layer_jobs, kinds, inputs, input_ats);

  IF c_jobs IS NOT NULL THEN
    -- Nothing of a new job can be booked yet, so a cap that comes with it needs no new fence of its show.
    INSERT INTO rota.job_resource (pk_job, pk_show, int_priority, int_max_cores, int_max_gpus)
    SELECT c.job, p.pk_show, c.priority, c.cores, c.gpus
    FROM unnest(c_jobs, c_layers, c_places, c_priorities, c_cores, c_gpus) AS c (job, layer, place, priority, cores, gpus)
    JOIN unnest(places) WITH ORDINALITY AS p ON p.ordinality = c.place
    JOIN rota.job j ON j.pk_job = c.job
    WHERE c.layer IS NULL;
    INSERT INTO rota.layer_resource (pk_layer, pk_job, pk_show, int_max_cores, int_max_gpus)
    SELECT c.layer, c.job, p.pk_show, c.cores, c.gpus
    FROM unnest(c_jobs, c_layers, c_places, c_priorities, c_cores, c_gpus) AS c (job, layer, place, priority, cores, gpus)
    JOIN unnest(places) WITH ORDINALITY AS p ON p.ordinality = c.place
    JOIN rota.job j ON j.pk_job = c.job
    WHERE c.layer IS NOT NULL;
  END IF;

  IF i_layers IS NOT NULL THEN
    UPDATE rota.layer l SET items = i.items
    FROM (SELECT u.layer, array_agg(u.item ORDER BY u.at) AS items
          FROM unnest(i_layers, i_items) WITH ORDINALITY AS u (layer, item, at) GROUP BY u.layer) AS i
    WHERE l.pk_layer = i.layer;
  END IF;

  IF cardinality(e_jobs) > 0 THEN
    PERFORM rota.job_enqueue(places, e_places, e_jobs, e_layers, e_frames, e_counts, e_payloads, e_run_ats);
  END IF;
END $$;

COMMENT ON FUNCTION rota.job_submit IS
  'Write jobs with their layers, caps, keys and queue entries, in the caller''s transaction.';

-- The same for a job of one layer and one range of frames that may be queued at once, without caps or items of its
-- own. Each statement is planned once and looks rows up by their keys, so it costs PostgreSQL a third of `job_submit`.
CREATE OR REPLACE FUNCTION rota.job_submit_one(
  of_show text, of_folder text, of_dept text, of_class bytea, of_priority smallint,
  of_name text, of_topic text, of_labels jsonb, of_request bytea, deadline_ms bigint, wait_ms bigint,
  said bytea, said_until timestamptz, of_job uuid, of_workflow text, of_key text, of_digest bytea,
  of_layer uuid, layer_name text, of_work bytea, of_input bytea, of_first integer, of_step integer, of_frames integer
)
RETURNS SETOF rota.job_unwritten
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
  moment timestamptz := clock_timestamp();
  place rota.job_place;
  lane integer;
  decision integer;
BEGIN
  -- Subqueries instead of joins: for tables that were tiny when this was planned, joins in any order look equally cheap.
  SELECT q.pk_show, q.pk_folder, q.pk_dept, q.queue,
         (SELECT l.lane_id FROM rota.queue_lanes l
          WHERE l.queue = q.queue AND l.priority = of_priority AND l.enqueue_shard = 0)
  INTO place.pk_show, place.pk_folder, place.pk_dept, place.queue, lane
  FROM rota.queue_class q
  WHERE q.pk_show = (SELECT s.pk_show FROM rota.show s WHERE s.str_name = of_show)
    AND q.pk_folder = (SELECT f.pk_folder FROM rota.folder f
                       WHERE f.pk_show = (SELECT s.pk_show FROM rota.show s WHERE s.str_name = of_show)
                         AND f.str_name = of_folder)
    AND q.pk_dept = (SELECT d.pk_dept FROM rota.dept d WHERE d.str_name = of_dept)
    AND q.class_id = (SELECT c.class_id FROM rota.placement_class c WHERE c.digest = of_class);
  IF lane IS NULL THEN
    place := (rota.job_places(ARRAY[of_show], ARRAY[of_folder], ARRAY[of_dept], ARRAY[of_class],
                              ARRAY[of_priority]))[1];
    IF place.fault IS NOT NULL THEN
      RETURN NEXT ROW(1, place.fault, NULL, NULL)::rota.job_unwritten;
      RETURN;
    END IF;
  END IF;

  IF said IS NOT NULL THEN
    SELECT w.word INTO decision FROM rota.policy_word w WHERE w.digest = said;
    IF NOT FOUND THEN
      RETURN NEXT ROW(0, 'new_word', NULL, NULL)::rota.job_unwritten;
      RETURN;
    END IF;
  END IF;

  WHILE of_key IS NOT NULL LOOP
    -- Waits for a concurrent transaction with the same key.
    INSERT INTO rota.idempotency_key (pk_show, key, pk_job, digest) VALUES (place.pk_show, of_key, of_job, of_digest)
    ON CONFLICT DO NOTHING;
    EXIT WHEN FOUND;
    RETURN QUERY SELECT * FROM rota.job_keys_known(ARRAY[place.pk_show], ARRAY[of_key], ARRAY[of_job], ARRAY[of_digest]);
    IF FOUND THEN
      RETURN;
    END IF;
    -- It is this job's already, or it expired and was deleted in between: then it is taken again.
    EXIT WHEN EXISTS (SELECT FROM rota.idempotency_key k WHERE k.pk_show = place.pk_show AND k.key = of_key);
  END LOOP;

  -- After the last statement that may wait for another transaction: an expired policy decision queues nothing.
  IF clock_timestamp() > said_until THEN
    DELETE FROM rota.idempotency_key k WHERE k.pk_show = place.pk_show AND k.key = of_key AND k.pk_job = of_job;
    RETURN NEXT ROW(0, 'old_word', NULL, NULL)::rota.job_unwritten;
    RETURN;
  END IF;

  INSERT INTO rota.job (pk_job, pk_show, pk_folder, pk_dept, str_name, topic, priority, state, labels, request,
                        workflow_id, ts_submitted, ts_updated, ts_deadline, ts_wait_until, history, word)
  SELECT of_job, place.pk_show, place.pk_folder, place.pk_dept, of_name, of_topic, of_priority, 'SCHEDULED', of_labels,
         of_request, of_workflow, moment, moment, moment + deadline_ms * interval '1 ms',
         moment + wait_ms * interval '1 ms', rota.job_history('SCHEDULED', NULL, moment), decision
  -- The submitter may not know that servers require a policy; PostgreSQL does.
  WHERE decision IS NOT NULL OR (SELECT g.asks FROM rota.policy_guard g) IS NOT TRUE;
  IF NOT FOUND THEN
    DELETE FROM rota.idempotency_key k WHERE k.pk_show = place.pk_show AND k.key = of_key AND k.pk_job = of_job;
    RETURN NEXT ROW(0, 'unasked', NULL, NULL)::rota.job_unwritten;
    RETURN;
  END IF;
  INSERT INTO rota.layer (pk_layer, pk_job, number, str_name, queue, work, input, first_frame, frame_step, frames)
  VALUES (of_layer, of_job, 0, layer_name, place.queue, of_work, of_input, of_first, of_step, of_frames);
  PERFORM rota.queue_enqueue_one(place.queue, of_priority, lane, of_job, of_layer, of_first, of_frames, NULL);
END $$;

COMMENT ON FUNCTION rota.job_submit_one IS
  'Write one job of one layer with its key and queue entry, in the caller''s transaction.';

-- A layer as it is displayed.
CREATE OR REPLACE FUNCTION rota.layer_shown(l rota.layer) RETURNS jsonb
LANGUAGE sql STABLE AS $$
  SELECT jsonb_strip_nulls(jsonb_build_object(
    'id', l.pk_layer, 'number', l.number, 'name', l.str_name, 'queue', l.queue,
    'work', translate(encode(l.work, 'base64'), E'\n', ''),
    'input', translate(encode(l.input, 'base64'), E'\n', ''), 'input_at', l.input_at, 'first_frame', l.first_frame,
    'frame_step', l.frame_step, 'ranges', l.ranges, 'frames', l.frames, 'succeeded', l.succeeded,
    'quarantined', l.quarantined, 'failed', l.failed, 'timed_out', l.timed_out, 'cancelled', l.cancelled,
    'denied', l.denied, 'took_ms', l.took_ms))
$$;

-- Queues jobs that were waiting for admission, each by its policy decision (null: no policy was asked). Of two
-- concurrent admissions of a job one succeeds, and the other gets no row. Expired decisions queue nothing, nor does a
-- null decision while servers require a policy: the caller may be configured differently.
CREATE OR REPLACE FUNCTION rota.job_admit(ids uuid[], said bytea[], words_until timestamptz) RETURNS SETOF uuid
LANGUAGE plpgsql AS $$
DECLARE
  words integer[] := rota.policy_words(said);
  given uuid[] := ids;
  moment timestamptz;
  admitted uuid[];
  e record;
BEGIN
  PERFORM FROM rota.job j WHERE j.pk_job = ANY (ids) AND j.state = 'PENDING' ORDER BY j.pk_job FOR UPDATE;
  moment := clock_timestamp();
  IF moment > words_until THEN
    RETURN;
  END IF;
  ids := ARRAY(SELECT id FROM unnest(ids) AS id
               WHERE NOT EXISTS (SELECT FROM rota.job_after a WHERE a.pk_job = id)
                 AND (words[array_position(given, id)] IS NOT NULL OR NOT (SELECT g.asks FROM rota.policy_guard g)));
  WITH moved AS (
    UPDATE rota.job j SET state = 'SCHEDULED', reason = NULL, ts_updated = moment, asks = NULL, ts_ask_at = NULL,
      word = words[array_position(given, j.pk_job)],
      history = j.history || jsonb_build_array(
        jsonb_build_array('SCHEDULED', floor(extract(epoch FROM moment) * 1000)::bigint, NULL))
    WHERE j.pk_job = ANY (ids) AND j.state = 'PENDING' RETURNING j.pk_job
  ) SELECT array_agg(m.pk_job) INTO admitted FROM moved m;
  IF admitted IS NULL THEN
    RETURN;
  END IF;

  SELECT array_agg(s.place) AS places, array_agg(s.job) AS jobs, array_agg(s.layer) AS layers,
         array_agg(s.frame) AS frames, array_agg(s.n) AS counts, array_agg(s.payload) AS payloads,
         array_agg(s.run_at) AS run_ats INTO e
  FROM (
    SELECT dense_rank() OVER (ORDER BY l.queue COLLATE "C", j.priority)::integer AS place, j.pk_job AS job,
           l.pk_layer AS layer, part.frame, part.n, part.payload, j.ts_run_at AS run_at
    FROM rota.job j JOIN rota.layer l ON l.pk_job = j.pk_job
    CROSS JOIN LATERAL (
      SELECT l.first_frame AS frame, l.frames AS n, NULL::bytea AS payload WHERE l.items IS NULL AND l.ranges IS NULL
      UNION ALL
      SELECT l.ranges[at], l.ranges[at + 1], NULL
      FROM generate_series(1, cardinality(l.ranges), 2) AS at WHERE l.items IS NULL
      UNION ALL
      SELECT coalesce(place.frame, (item.at - 1)::integer), 1, item.payload
      FROM unnest(l.items) WITH ORDINALITY AS item (payload, at)
      LEFT JOIN (SELECT r.first + step.n AS frame, row_number() OVER (ORDER BY r.first, step.n) AS at
                 FROM (SELECT l.ranges[i] AS first, l.ranges[i + 1] AS n
                       FROM generate_series(1, cardinality(l.ranges), 2) AS i) AS r
                 CROSS JOIN LATERAL generate_series(0, r.n - 1) AS step (n)) AS place ON place.at = item.at
    ) AS part
    WHERE j.pk_job = ANY (admitted) ORDER BY j.pk_job, l.number, part.frame
  ) AS s;
  UPDATE rota.layer l SET items = NULL WHERE l.pk_job = ANY (admitted) AND l.items IS NOT NULL;
  PERFORM rota.job_enqueue(
    ARRAY(SELECT ROW(NULL, NULL, NULL, lane.queue, lane.priority, NULL)::rota.job_place
          FROM (SELECT DISTINCT l.queue, j.priority FROM rota.job j JOIN rota.layer l ON l.pk_job = j.pk_job
                WHERE j.pk_job = ANY (admitted)) AS lane ORDER BY lane.queue COLLATE "C", lane.priority),
    e.places, e.jobs, e.layers, e.frames, e.counts, e.payloads, e.run_ats);
  RETURN QUERY SELECT unnest(admitted);
END $$;
