-- The functions of CHECK constraints are in PL/pgSQL: one in SQL would be inlined, which parses it again in every statement
-- that writes such a row (25 us). Strict, so that they are not even called for the usual NULL.

-- Whether a text is a `Reason`; of the column `reason` of live jobs. A test compares the list with the code.
CREATE OR REPLACE FUNCTION rota.is_reason(reason text) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $$
BEGIN
  RETURN reason IN (
    'approval_expired', 'approval_rejected', 'approval_required', 'approval_stale_request', 'approved', 'behind',
    'books_unavailable', 'bus_unavailable', 'cancelled', 'compensating', 'deadline_expired', 'deferred',
    'dispatch_failed', 'dispatch_timeout', 'ending', 'fair_share', 'frame_failed', 'job_before_failed',
    'max_retries_exceeded', 'max_wait_expired', 'news_waiting', 'no_pool_mapping', 'no_server', 'no_workers',
    'output_quarantined', 'output_quarantined_async', 'paused', 'policy_pending', 'policy_throttled',
    'policy_unavailable', 'pool_overloaded', 'queued', 'quota_folder', 'quota_job', 'quota_layer', 'quota_point',
    'quota_subscription', 'run_paused', 'running_timeout', 'safety_denied', 'tenant_limit', 'unknown_task',
    'waiting_on_job', 'waiting_on_run', 'worker_lost');
END $$;

-- Whether a code is one of rota.model.attempt_codes, or a reason for which servers end attempts.
CREATE OR REPLACE FUNCTION rota.is_attempt_code(code text) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $$
BEGIN
  RETURN code IN (
    'artifact_limit', 'artifact_missing', 'artifact_not_stored', 'artifact_too_large', 'bad_input', 'cpu_limit',
    'draining', 'exception', 'exit_status', 'fatal', 'file_limit', 'handed_back', 'input_missing', 'job_ended',
    'no_command', 'no_process', 'no_room', 'publish_failed', 'result_too_large', 'retry', 'series_lost', 'signal',
    'timeout', 'unencodable_result', 'unknown_task', 'worker_stopped') OR rota.is_reason(code);
END $$;

-- Whether a reason is a `DeadLetterReason` of rota.model.reasons, or one of a job or an attempt.
CREATE OR REPLACE FUNCTION rota.is_dead_letter_reason(reason text) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $$
BEGIN
  RETURN reason IN (
    'deliveries_exhausted', 'saga_compensation_denied', 'saga_compensation_failed', 'saga_unmarshal_failed',
    'submission_refused', 'unreadable_message') OR rota.is_attempt_code(reason);
END $$;

-- The whole history of a job. Most jobs are queued when they are submitted and succeed before a state between is written:
-- their history follows from other columns and is not stored, which saves a third of what such a job writes to `job_done`.
-- A stored history that does not begin with PENDING continues PENDING and SCHEDULED at submission; an empty one of an
-- ended job means that it was dispatched and ended at `finished`.
CREATE OR REPLACE FUNCTION rota.job_history_shown(
  history jsonb, state text, submitted timestamptz, finished timestamptz
) RETURNS jsonb
LANGUAGE sql STABLE AS $$
  SELECT CASE WHEN history -> 0 ->> 0 = 'PENDING' THEN history ELSE
    jsonb_build_array(jsonb_build_array('PENDING', floor(extract(epoch FROM submitted) * 1000)::bigint, NULL),
                      jsonb_build_array('SCHEDULED', floor(extract(epoch FROM submitted) * 1000)::bigint, NULL))
    || history || CASE WHEN history = '[]' AND finished IS NOT NULL
      THEN jsonb_build_array(jsonb_build_array('DISPATCHED', floor(extract(epoch FROM finished) * 1000)::bigint, NULL),
                             jsonb_build_array(state, floor(extract(epoch FROM finished) * 1000)::bigint, NULL))
      ELSE '[]' END END
$$;

-- The history of a job with one more entry. The history of a job that goes to and fro for days keeps its first 20 and
-- its last 60 entries, because every change writes it whole.
CREATE OR REPLACE FUNCTION rota.history_add(history jsonb, state text, reason text) RETURNS jsonb
LANGUAGE sql VOLATILE AS $$
  SELECT CASE WHEN jsonb_array_length(history) < 80 THEN history ELSE (
           SELECT jsonb_agg(e.entry ORDER BY e.at) FROM jsonb_array_elements(history) WITH ORDINALITY AS e (entry, at)
           WHERE e.at <= 20 OR e.at > jsonb_array_length(history) - 60) END
         || jsonb_build_array(jsonb_build_array(state, rota.now_ms(), reason))
$$;

-- Sets DISPATCHED and RUNNING jobs back to SCHEDULED that have no booked frame, now and when the caller last looked
-- (`idle_before`): all their frames wait, for a retry, a worker or a limit. Returns every job without a booked frame;
-- those that changed have a topic.
-- Jobs are locked before their procs are read again, and `jobs_mark` skips locked jobs: a frame that is booked meanwhile
-- is either seen here, or marks its job afterwards. EXCEPT is hashed or sorted whatever the statistics say.
CREATE OR REPLACE FUNCTION rota.jobs_reschedule(idle_before uuid[])
RETURNS TABLE (pk_job uuid, pk_show uuid, topic text)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  idle uuid[] := ARRAY(
    SELECT j.pk_job FROM rota.job j WHERE j.state IN ('DISPATCHED', 'RUNNING') AND j.ends_as IS NULL
    EXCEPT SELECT p.pk_job FROM rota.proc p WHERE NOT p.b_ended);
  still uuid[] := ARRAY(SELECT i FROM unnest(idle) AS i INTERSECT SELECT b FROM unnest(idle_before) AS b);
  locked uuid[];
BEGIN
  IF cardinality(still) > 0 THEN
    locked := ARRAY(SELECT j.pk_job FROM rota.job j WHERE j.pk_job = ANY (still) FOR NO KEY UPDATE SKIP LOCKED);
    RETURN QUERY
    UPDATE rota.job j SET
      state = 'SCHEDULED', reason = NULL, ts_updated = clock_timestamp(),
      history = rota.history_add(j.history, 'SCHEDULED', NULL)
    WHERE j.pk_job = ANY (ARRAY(SELECT l FROM unnest(locked) AS l EXCEPT SELECT p.pk_job FROM rota.proc p WHERE NOT p.b_ended))
      AND j.state IN ('DISPATCHED', 'RUNNING') AND j.ends_as IS NULL
    RETURNING j.pk_job, j.pk_show, j.topic;
  END IF;
  RETURN QUERY SELECT i, NULL::uuid, NULL::text FROM unnest(idle) AS i;
END $$;

-- Marks SCHEDULED jobs as DISPATCHED that have had a booked frame for two seconds: the server that booked it has died
-- before it wrote the state. Returns those that changed. Jobs whose row is locked are left to the next call.
CREATE OR REPLACE FUNCTION rota.jobs_mark_booked() RETURNS TABLE (pk_job uuid, pk_show uuid, topic text)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  booked uuid[] := ARRAY(
    SELECT DISTINCT p.pk_job FROM rota.proc p WHERE NOT p.b_ended AND p.ts_booked < clock_timestamp() - interval '2 s');
BEGIN
  RETURN QUERY
  UPDATE rota.job j SET
    state = 'DISPATCHED', reason = NULL, ts_wait_until = NULL, ts_updated = clock_timestamp(),
    history = rota.history_add(j.history, 'DISPATCHED', NULL)
  FROM (SELECT w.pk_job FROM rota.job w
        WHERE w.pk_job = ANY (booked) AND w.state = 'SCHEDULED' AND w.ends_as IS NULL
        FOR NO KEY UPDATE SKIP LOCKED) AS unmarked
  WHERE j.pk_job = unmarked.pk_job
  RETURNING j.pk_job, j.pk_show, j.topic;
END $$;
