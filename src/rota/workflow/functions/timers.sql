-- Runs with inbox rows or a due timer, with all of them, locked. Rows of a run that another transaction has locked
-- stay. A timer is due by the clock of this server alone. Rows locked here are found again by their ctid, and no table
-- is joined: statistics of constantly emptied tables are always wrong.
CREATE OR REPLACE FUNCTION rota.workflow_take(most integer, since bigint) RETURNS SETOF rota.workflow_taken
LANGUAGE plpgsql SET enable_seqscan = off SET enable_nestloop = off AS $$
DECLARE
  moment timestamptz := clock_timestamp();  -- read once: an index cannot be searched for a volatile value
  news record;
  due record;
  taken bigint;
BEGIN
  -- Outputs under scan are held back: the next step would read what is quarantined a moment later (ADR 20).
  SELECT array_agg(n.ctid) AS rows, array_agg(n.workflow_id::uuid) AS runs INTO news
  FROM (SELECT n.ctid, n.workflow_id FROM rota.workflow_news n
        WHERE n.news_id >= since AND n.kind NOT IN ('undo', 'free')
          AND (SELECT s.pk_job FROM rota.scan s WHERE s.pk_job = n.pk_job LIMIT 1) IS NULL
        ORDER BY n.news_id LIMIT most FOR UPDATE SKIP LOCKED) AS n;
  SELECT array_agg(t.ctid) AS rows, array_agg(t.pk_run) AS runs INTO due
  FROM (SELECT t.ctid, t.pk_run FROM rota.workflow_timer t WHERE t.ts_due <= moment
        ORDER BY t.ts_due LIMIT most FOR UPDATE SKIP LOCKED) AS t;
  IF news.rows IS NULL AND due.rows IS NULL THEN
    RETURN;
  END IF;

  RETURN QUERY
  WITH run AS MATERIALIZED (
    SELECT r.* FROM rota.workflow_run r WHERE r.pk_run = ANY (news.runs || due.runs) AND r.ts_ended IS NULL
    ORDER BY r.pk_run FOR NO KEY UPDATE SKIP LOCKED
  ), heard AS (
    DELETE FROM rota.workflow_news n
    WHERE n.ctid = ANY (news.rows) AND n.workflow_id = ANY (
      CASE n.kind WHEN 'job' THEN ARRAY(SELECT r.pk_run::text FROM run r WHERE r.state <> 'COMPENSATING')
                  ELSE ARRAY(SELECT r.pk_run::text FROM run r) END)
    RETURNING n.*
  ), fired AS (
    DELETE FROM rota.workflow_timer t
    WHERE t.ctid = ANY (due.rows) AND t.pk_run = ANY (ARRAY(SELECT r.pk_run FROM run r))
    RETURNING t.*
  ), told AS (
    SELECT h.workflow_id::uuid AS pk_run, h.news_id AS at, NULL::timestamptz AS due_at, h.kind, h.pk_job, h.state AS ended_as,
           h.reason, h.pk_layer, h.frames, e.value, e.value_at, e.code, e.error, h.request, NULL::smallint AS place,
           NULL::integer AS attempt
    FROM heard h LEFT JOIN LATERAL (
      -- The end of a job's only frame is written in the transaction of the job's end, so both have the same time.
      SELECT CASE WHEN rota.output_readable(e.output) THEN e.value END AS value,
             CASE WHEN rota.output_readable(e.output) THEN e.value_at END AS value_at, e.code, e.error
      FROM rota.frame_end e
      WHERE h.frames = 1 AND e.pk_layer = h.pk_layer AND e.ts_finished = h.ts_at
      ORDER BY e.attempt DESC LIMIT 1
    ) AS e ON true
    UNION ALL
    SELECT f.pk_run, NULL, f.ts_due, 'timer', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, f.place, f.attempt
    FROM fired f
  ), ordered AS (
    SELECT t.*, row_number() OVER (PARTITION BY t.pk_run ORDER BY t.at, t.due_at) = 1 AS is_first FROM told t
  )
  SELECT r.pk_run, r.pk_show, r.pk_workflow, r.state, r.fence, r.pk_root, r.depth, r.actor, rota.now_ms(),
         CASE WHEN o.is_first THEN r.steps END, CASE WHEN o.is_first THEN r.input END,
         o.at, o.kind, o.pk_job, o.ended_as, o.reason, o.pk_layer, o.frames, o.value, o.value_at, o.code, o.error, o.request,
         o.place, o.attempt
  FROM ordered o JOIN run r USING (pk_run) ORDER BY r.pk_run, o.at, o.due_at;
  GET DIAGNOSTICS taken = ROW_COUNT;

  IF taken < coalesce(cardinality(news.rows), 0) + coalesce(cardinality(due.rows), 0) THEN
    -- Runs that have ended receive nothing any more; ends of jobs are left to sagas.
    UPDATE rota.workflow_news n SET kind = 'free'
    WHERE n.ctid = ANY (news.rows) AND n.kind = 'job' AND (
      SELECT r.pk_run FROM rota.workflow_run r
      WHERE r.pk_run = n.workflow_id::uuid AND r.ts_ended IS NULL AND r.state <> 'COMPENSATING' LIMIT 1) IS NULL;
    DELETE FROM rota.workflow_news n
    WHERE n.ctid = ANY (news.rows) AND n.kind <> 'job' AND (
      SELECT r.pk_run FROM rota.workflow_run r WHERE r.pk_run = n.workflow_id::uuid AND r.ts_ended IS NULL LIMIT 1) IS NULL;
    DELETE FROM rota.workflow_timer t
    WHERE t.ctid = ANY (due.rows) AND (
      SELECT r.pk_run FROM rota.workflow_run r WHERE r.pk_run = t.pk_run AND r.ts_ended IS NULL LIMIT 1) IS NULL;
  END IF;
END $$;

COMMENT ON FUNCTION rota.workflow_take IS
  'Deletes the inbox rows and timers that it returns; a crash before the commit rolls this back.';

-- Pending work. By index alone: a constantly emptied table looks small to the planner, and may be full of dead rows.
CREATE OR REPLACE FUNCTION rota.workflow_look(since bigint, OUT runs boolean, OUT sagas boolean, OUT in_ms bigint)
LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
  in_ms := (SELECT ceil(extract(epoch FROM t.ts_due - clock_timestamp()) * 1000) FROM rota.workflow_timer t
            ORDER BY t.ts_due LIMIT 1);
  runs := coalesce(in_ms <= 0, false) OR EXISTS (
    SELECT FROM rota.workflow_news n WHERE n.news_id >= since AND n.kind NOT IN ('undo', 'free'));
  sagas := EXISTS (SELECT FROM rota.workflow_news n WHERE n.kind IN ('undo', 'free'))
    OR EXISTS (SELECT FROM rota.saga s WHERE s.state = 'rolling_back');
END $$;
