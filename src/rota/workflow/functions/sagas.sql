-- Deletes ends of jobs that belong to no active run: compensations, and jobs that joined a saga by themselves. The saga
-- of a nested run is that of the outermost.
CREATE OR REPLACE FUNCTION rota.saga_take(most integer) RETURNS TABLE (
  kind text, workflow_id text, pk_show uuid, pk_job uuid, state text, request bytea, code text, error text, of_run boolean
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  news bigint[];
BEGIN
  news := ARRAY(
    SELECT n.news_id FROM rota.workflow_news n
    WHERE n.kind IN ('undo', 'free')
    ORDER BY n.news_id LIMIT most FOR UPDATE SKIP LOCKED);
  RETURN QUERY
  WITH heard AS (DELETE FROM rota.workflow_news n WHERE n.news_id = ANY (news) RETURNING n.*)
  SELECT h.kind, coalesce(o.pk_root::text, h.workflow_id), h.pk_show, h.pk_job, h.state, h.request, e.code,
         coalesce(e.error, h.reason), o.pk_root IS NOT NULL
  FROM heard h LEFT JOIN LATERAL (
    SELECT r.pk_root FROM rota.workflow_run r
    WHERE r.pk_run = CASE WHEN rota.is_uuid(h.workflow_id) THEN h.workflow_id::uuid END AND r.pk_show = h.pk_show LIMIT 1
  ) AS o ON true
  LEFT JOIN LATERAL (
    SELECT e.code, e.error FROM rota.frame_end e
    WHERE e.pk_layer = h.pk_layer AND e.ts_finished = h.ts_at AND e.state NOT IN ('RETRIED', 'RETURNED', 'SUCCEEDED')
    ORDER BY e.code IN ('fatal', 'bad_input') DESC LIMIT 1
  ) AS e ON true
  ORDER BY h.news_id;
END $$;

-- Records compensations of jobs; existing ones are left unchanged. Returns the number of new ones.
CREATE OR REPLACE FUNCTION rota.saga_record(
  shows uuid[], workflow_ids text[], jobs uuid[], steps text[], templates bytea[], errors text[]
) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
  recorded integer;
BEGIN
  INSERT INTO rota.saga (pk_show, workflow_id)
  SELECT DISTINCT g.pk_show, g.workflow_id FROM unnest(shows, workflow_ids) AS g (pk_show, workflow_id) ORDER BY 1, 2
  ON CONFLICT DO NOTHING;
  PERFORM FROM rota.saga s JOIN unnest(shows, workflow_ids) AS g (pk_show, workflow_id) USING (pk_show, workflow_id)
  ORDER BY s.pk_saga FOR NO KEY UPDATE OF s;
  INSERT INTO rota.saga_entry (pk_saga, pk_job, step, template, state, error)
  SELECT s.pk_saga, g.job, g.step, g.template, CASE WHEN g.error IS NULL THEN 'pending' ELSE 'corrupt' END, g.error
  FROM unnest(shows, workflow_ids, jobs, steps, templates, errors) WITH ORDINALITY
    AS g (pk_show, workflow_id, job, step, template, error, at)
  JOIN rota.saga s ON s.pk_show = g.pk_show AND s.workflow_id = g.workflow_id
  ORDER BY g.at
  ON CONFLICT (pk_job) DO NOTHING;
  GET DIAGNOSTICS recorded = ROW_COUNT;
  -- A job that succeeds during or after the rollback is compensated as well.
  UPDATE rota.saga s SET state = 'rolling_back', ts_ended = NULL
  FROM unnest(shows, workflow_ids) AS g (pk_show, workflow_id)
  WHERE s.pk_show = g.pk_show AND s.workflow_id = g.workflow_id AND s.state IN ('rolled_back', 'incomplete')
    AND EXISTS (SELECT FROM rota.saga_entry e WHERE e.pk_saga = s.pk_saga AND e.state = 'pending');
  RETURN recorded;
END $$;

-- Starts the rollback of sagas with recorded compensations; returns them.
CREATE OR REPLACE FUNCTION rota.saga_roll_back(shows uuid[], workflow_ids text[], why text) RETURNS SETOF text
LANGUAGE sql AS $$
  UPDATE rota.saga s SET state = 'rolling_back', reason = why, ts_began = clock_timestamp(), ts_ended = NULL
  FROM (SELECT s.pk_saga FROM rota.saga s
        JOIN unnest(shows, workflow_ids) AS g (pk_show, workflow_id) USING (pk_show, workflow_id)
        WHERE s.state = 'open' AND EXISTS (SELECT FROM rota.saga_entry e WHERE e.pk_saga = s.pk_saga)
        ORDER BY s.pk_saga FOR NO KEY UPDATE OF s) AS found
  WHERE s.pk_saga = found.pk_saga
  RETURNING s.workflow_id
$$;

-- Sagas that roll back and run nothing at the moment, locked, each with its last remaining entry; null: none left.
CREATE OR REPLACE FUNCTION rota.saga_due(most integer) RETURNS TABLE (
  pk_saga bigint, pk_show uuid, workflow_id text, number bigint, pk_job uuid, step text, template bytea, attempt integer,
  took_s float8
) LANGUAGE sql AS $$
  WITH due AS (
    SELECT s.* FROM rota.saga s
    WHERE s.state = 'rolling_back'
      AND NOT EXISTS (SELECT FROM rota.saga_entry e WHERE e.pk_saga = s.pk_saga AND e.state = 'running')
    ORDER BY s.pk_saga LIMIT most FOR NO KEY UPDATE SKIP LOCKED
  )
  SELECT d.pk_saga, d.pk_show, d.workflow_id, e.number, e.pk_job, e.step, e.template, e.attempt,
         extract(epoch FROM clock_timestamp() - d.ts_began)::float8
  FROM due d LEFT JOIN LATERAL (
    SELECT * FROM rota.saga_entry e WHERE e.pk_saga = d.pk_saga AND e.state = 'pending' ORDER BY e.number DESC LIMIT 1
  ) AS e ON NOT EXISTS (SELECT FROM rota.saga_entry r WHERE r.pk_saga = d.pk_saga AND r.state = 'running')
$$;

-- Sagas without remaining entries: they have ended, and the runs that wait for them receive it.
CREATE OR REPLACE FUNCTION rota.saga_end(sagas bigint[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  UPDATE rota.saga s SET ts_ended = clock_timestamp(), state = CASE WHEN EXISTS (
    SELECT FROM rota.saga_entry e WHERE e.pk_saga = s.pk_saga AND e.state <> 'done') THEN 'incomplete' ELSE 'rolled_back' END
  WHERE s.pk_saga = ANY (sagas) AND s.state = 'rolling_back';
  INSERT INTO rota.workflow_news (kind, workflow_id, pk_show, reason)
  SELECT 'saga', s.workflow_id, s.pk_show, s.state FROM rota.saga s
  WHERE s.pk_saga = ANY (sagas) AND EXISTS (
    SELECT FROM rota.workflow_run r
    WHERE r.pk_run = CASE WHEN rota.is_uuid(s.workflow_id) THEN s.workflow_id::uuid END AND r.pk_show = s.pk_show
      AND r.state = 'COMPENSATING');
END $$;

-- An operator starts a rollback, or resumes after a failed, skipped or unreadable entry; no row: the saga does not
-- exist.
CREATE OR REPLACE FUNCTION rota.saga_resume(of_show uuid, of_workflow text, why text) RETURNS SETOF integer
LANGUAGE plpgsql AS $$
DECLARE
  saga bigint;
BEGIN
  SELECT s.pk_saga INTO saga FROM rota.saga s WHERE s.pk_show = of_show AND s.workflow_id = of_workflow FOR NO KEY UPDATE;
  IF saga IS NULL THEN
    RETURN;
  END IF;
  UPDATE rota.saga_entry e SET state = 'pending', attempt = e.attempt + 1, pk_undo = NULL, error = NULL, ts_changed = clock_timestamp()
  WHERE e.pk_saga = saga AND e.state IN ('failed', 'skipped', 'corrupt');
  UPDATE rota.saga s SET state = 'rolling_back', reason = coalesce(s.reason, why), ts_ended = NULL,
    ts_began = coalesce(s.ts_began, clock_timestamp())
  WHERE s.pk_saga = saga;
  RETURN QUERY SELECT count(*)::integer FROM rota.saga_entry e WHERE e.pk_saga = saga AND e.state = 'pending';
END $$;

CREATE OR REPLACE FUNCTION rota.saga_changes() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
  NEW.fence := OLD.fence + 1;
  RETURN NEW;
END $$;

CREATE OR REPLACE TRIGGER saga_changes BEFORE UPDATE ON rota.saga FOR EACH ROW EXECUTE FUNCTION rota.saga_changes();

-- By id: the lock order of all who lock several sagas.
CREATE OR REPLACE FUNCTION rota.saga_entries_change() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
  UPDATE rota.saga s SET fence = s.fence
  FROM (SELECT s.pk_saga FROM rota.saga s WHERE s.pk_saga IN (SELECT c.pk_saga FROM changed c)
        ORDER BY s.pk_saga FOR NO KEY UPDATE) AS l
  WHERE s.pk_saga = l.pk_saga;
  RETURN NULL;
END $$;

CREATE OR REPLACE TRIGGER saga_entries_recorded AFTER INSERT ON rota.saga_entry REFERENCING NEW TABLE AS changed
  FOR EACH STATEMENT EXECUTE FUNCTION rota.saga_entries_change();

CREATE OR REPLACE TRIGGER saga_entries_changed AFTER UPDATE ON rota.saga_entry REFERENCING NEW TABLE AS changed
  FOR EACH STATEMENT EXECUTE FUNCTION rota.saga_entries_change();
