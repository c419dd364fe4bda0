-- What keeps the engine tidy: days of what has ended, logs of frames, and how many jobs of a show run at once.
-- See docs/adr/0016-upkeep.md.

-- What a frame wrote, in pieces, by the day they came in.
CREATE TABLE rota.frame_log (
  pk_layer   uuid NOT NULL,
  frame      integer NOT NULL,
  attempt    smallint NOT NULL,
  token      bigint NOT NULL,
  stream     text NOT NULL CHECK (stream IN ('stdout', 'stderr', 'log')),
  at         bigint NOT NULL CHECK (at >= 0),
  dropped    bigint NOT NULL DEFAULT 0,
  data       bytea NOT NULL,
  last       boolean NOT NULL DEFAULT false,
  ts_written timestamptz NOT NULL DEFAULT now()
) PARTITION BY RANGE (ts_written);

CREATE TABLE rota.frame_log_default PARTITION OF rota.frame_log DEFAULT;
CREATE INDEX ON rota.frame_log (pk_layer, frame, token);

COMMENT ON COLUMN rota.frame_log.at IS 'Place of its first byte among all that the stream ever wrote; pieces may overlap or leave gaps.';
COMMENT ON COLUMN rota.frame_log.dropped IS 'So many bytes right before it were too many to be kept; what else is missing there got lost.';
COMMENT ON COLUMN rota.frame_log.last IS 'Nothing follows in this stream.';

-- Carried on to a later day, a row still says when its frame ended.
ALTER TABLE rota.frame_end ADD COLUMN ts_ended timestamptz;
COMMENT ON COLUMN rota.frame_end.ts_ended IS 'When the attempt ended, if its row was carried on to a later day than that.';
CREATE INDEX frame_end_carried ON rota.frame_end (ts_ended) WHERE ts_ended IS NOT NULL;
CREATE INDEX frame_end_failed ON rota.frame_end (pk_layer, ts_finished) WHERE state NOT IN ('SUCCEEDED', 'RETRIED', 'RETURNED');

-- Jobs that lived across a midnight: what belongs to them may lie in an older day than they do.
CREATE INDEX job_done_overnight ON rota.job_done (ts_submitted)
  WHERE (ts_submitted AT TIME ZONE 'UTC')::date < (ts_finished AT TIME ZONE 'UTC')::date;

CREATE INDEX ON rota.worker (ts_ended) WHERE state <> 'up';

-- Partitions of a table but its default; `day` is in UTC.
CREATE FUNCTION rota.days_of(of_table text) RETURNS TABLE (name text, day date, since timestamptz, until timestamptz)
LANGUAGE sql STABLE AS $$
  SELECT c.relname::text, (b.since AT TIME ZONE 'UTC')::date, b.since, b.until
  FROM pg_inherits i
  JOIN pg_class c ON c.oid = i.inhrelid
  CROSS JOIN LATERAL (
    SELECT (regexp_match(told, $re$FROM \('([^']+)'\)$re$))[1]::timestamptz AS since,
           (regexp_match(told, $re$TO \('([^']+)'\)$re$))[1]::timestamptz AS until
    FROM (SELECT pg_get_expr(c.relpartbound, c.oid) AS told) AS bound
  ) AS b
  WHERE i.inhparent = to_regclass('rota.' || quote_ident(of_table)) AND b.since IS NOT NULL
$$;

CREATE FUNCTION rota.day_column(of_table text) RETURNS name
LANGUAGE sql STABLE AS $$
  SELECT a.attname FROM pg_partitioned_table p
  JOIN pg_attribute a ON a.attrelid = p.partrelid AND a.attnum = p.partattrs[0]
  WHERE p.partrelid = to_regclass('rota.' || quote_ident(of_table))
$$;

-- Days of which the default partition has rows.
CREATE FUNCTION rota.days_astray(of_table text, most integer) RETURNS SETOF date
LANGUAGE plpgsql AS $$
BEGIN
  RETURN QUERY EXECUTE format(
    'SELECT DISTINCT (d.%I AT TIME ZONE ''UTC'')::date AS day FROM rota.%I d ORDER BY day LIMIT %s',
    rota.day_column(of_table), of_table || '_default', most);
END $$;

-- A partition for a day, or for what is left of it. What the default took of it moves there in the same moment, at most
-- `most` rows at a time, and those of the same instant: then the partition ends with them ('part'), and the next call
-- makes one for the rest. 'there' when the day is complete; 'again' when nothing could be done yet.
-- Who has looked up the partitions before would miss rows that move, so nobody may read meanwhile; with none to move,
-- which is the rule, others are kept waiting by the default alone. Of a day that has begun nobody may write meanwhile:
-- whoever chose the default before would be refused by it after.
CREATE FUNCTION rota.day_make(of_table text, of_day date, most integer) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
  ends timestamptz := (of_day + 1)::timestamp AT TIME ZONE 'UTC';
  starts timestamptz;
  cut timestamptz;
  parts integer;
  alone boolean;
  astray boolean;
  moment name := rota.day_column(of_table);
  fallback text := of_table || '_default';
  is_astray text := format('SELECT EXISTS (SELECT FROM rota.%2$I d WHERE d.%1$I >= $1 AND d.%1$I < $2)', moment, fallback);
  part text;
BEGIN
  EXECUTE is_astray INTO alone USING of_day::timestamp AT TIME ZONE 'UTC', ends;
  EXECUTE format('LOCK TABLE ONLY rota.%I IN %s MODE', of_table,
                 CASE WHEN alone THEN 'ACCESS EXCLUSIVE'
                      WHEN of_day <= (clock_timestamp() AT TIME ZONE 'UTC')::date THEN 'SHARE ROW EXCLUSIVE'
                      ELSE 'SHARE UPDATE EXCLUSIVE' END);
  SELECT coalesce(max(d.until), of_day::timestamp AT TIME ZONE 'UTC'), count(*) INTO starts, parts
  FROM rota.days_of(of_table) AS d WHERE d.day = of_day;
  IF starts >= ends THEN
    RETURN 'there';
  END IF;

  EXECUTE format('LOCK TABLE rota.%I IN ACCESS EXCLUSIVE MODE', fallback);
  EXECUTE is_astray INTO astray USING starts, ends;
  IF astray AND NOT alone THEN
    RETURN 'again';  -- it came while we waited
  END IF;
  EXECUTE format('SELECT d.%1$I FROM rota.%2$I d WHERE d.%1$I >= $1 AND d.%1$I < $2 ORDER BY 1 OFFSET $3 LIMIT 1',
                 moment, fallback) INTO cut USING starts, ends, most;
  IF cut IS NOT NULL THEN
    ends := greatest(cut, starts + interval '1 microsecond');
  END IF;

  part := format('%s_%s', of_table, to_char(of_day, 'YYYYMMDD')) || CASE WHEN parts > 0 THEN '_' || parts ELSE '' END;
  EXECUTE format('CREATE TABLE rota.%I (LIKE rota.%I INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING STORAGE)', part,
                 of_table);
  IF astray THEN
    EXECUTE format('WITH moved AS (DELETE FROM rota.%2$I d WHERE d.%1$I >= $1 AND d.%1$I < $2 RETURNING d.*)'
                   ' INSERT INTO rota.%3$I SELECT * FROM moved', moment, fallback, part) USING starts, ends;
  END IF;
  EXECUTE format('ALTER TABLE rota.%I ATTACH PARTITION rota.%I FOR VALUES FROM (%L) TO (%L)', of_table, part, starts, ends);
  RETURN CASE WHEN cut IS NULL THEN 'made' ELSE 'part' END;
END $$;

CREATE FUNCTION rota.day_drop(of_table text, of_day date) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
  part text;
  dropped integer := 0;
BEGIN
  FOR part IN SELECT d.name FROM rota.days_of(of_table) AS d WHERE d.day = of_day ORDER BY 1 LOOP
    EXECUTE format('DROP TABLE rota.%I', part);
    dropped := dropped + 1;
  END LOOP;
  RETURN dropped;
END $$;

-- Ends of frames whose job is live, or is kept for longer than the day they lie in: to the day of their job, or to this one.
-- Nothing can come to belong to a day that is over, so when this finds nothing, the day may be dropped.
CREATE FUNCTION rota.frame_ends_carry(of_day date, most integer) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
  starts timestamptz := of_day::timestamp AT TIME ZONE 'UTC';
  ends timestamptz := (of_day + 1)::timestamp AT TIME ZONE 'UTC';
  carried bigint;
BEGIN
  WITH overnight AS (
    SELECT l.pk_layer, d.ts_finished FROM rota.job_done d CROSS JOIN LATERAL unnest(d.layers) AS l
    WHERE d.ts_finished >= ends AND d.ts_submitted < ends
      AND (d.ts_submitted AT TIME ZONE 'UTC')::date < (d.ts_finished AT TIME ZONE 'UTC')::date
  ), kept AS (
    SELECT e.tableoid AS part, e.ctid AS place, coalesce(o.ts_finished, now()) AS moment
    FROM rota.frame_end e
    LEFT JOIN rota.layer l ON l.pk_layer = e.pk_layer
    LEFT JOIN overnight o ON o.pk_layer = e.pk_layer
    WHERE e.ts_finished >= starts AND e.ts_finished < ends AND (l.pk_layer IS NOT NULL OR o.pk_layer IS NOT NULL)
    LIMIT most
  ), gone AS (
    DELETE FROM rota.frame_end e USING kept k
    WHERE e.ts_finished >= starts AND e.ts_finished < ends AND e.tableoid = k.part AND e.ctid = k.place
    RETURNING e.*, k.moment
  ), again AS (
    INSERT INTO rota.frame_end (pk_layer, frame, attempt, token, state, value, value_at, code, error, took_ms, pk_host,
                                artifacts, output, checks, ts_finished, ts_ended)
    SELECT g.pk_layer, g.frame, g.attempt, g.token, g.state, g.value, g.value_at, g.code, g.error, g.took_ms, g.pk_host,
           g.artifacts, g.output, g.checks, g.moment, coalesce(g.ts_ended, g.ts_finished)
    FROM gone g RETURNING 1
  ) SELECT count(*) INTO carried FROM again;
  RETURN carried;
END $$;

-- Caps of jobs that have ended, of which nothing is booked: kept with the job for whoever retries it, and removed from the
-- books, lest every job there ever was is told to Redis again and again. Nothing is booked for a job that has ended; a row
-- that counts something all the same stays, under the lock that counting takes, until the books have set it right.
ALTER TABLE rota.job_done ADD COLUMN caps jsonb;
COMMENT ON COLUMN rota.job_done.caps IS 'Its caps and those of its layers, by id: [cores, GPUs]. While it has rows in the books these hold.';

CREATE FUNCTION rota.caps_forget(most integer) RETURNS TABLE (pk_show uuid, jobs bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  ended uuid[] := ARRAY(
    SELECT r.pk_job FROM (
      SELECT k.pk_job FROM rota.job_resource k WHERE (k.int_cores, k.int_gpus) = (0, 0)
      UNION SELECT k.pk_job FROM rota.layer_resource k WHERE (k.int_cores, k.int_gpus) = (0, 0)) AS r
    WHERE NOT EXISTS (SELECT FROM rota.job j WHERE j.pk_job = r.pk_job)
      AND EXISTS (SELECT FROM rota.job_done d WHERE d.pk_job = r.pk_job)
      AND NOT EXISTS (SELECT FROM rota.proc p WHERE p.pk_job = r.pk_job)
    ORDER BY 1 LIMIT most);
BEGIN
  UPDATE rota.job_done d SET caps = coalesce(d.caps, '{}') || c.caps
  FROM (SELECT k.pk_job, jsonb_object_agg(k.id, jsonb_build_array(k.cores, k.gpus)) AS caps
        FROM (SELECT j.pk_job, j.pk_job AS id, j.int_max_cores AS cores, j.int_max_gpus AS gpus FROM rota.job_resource j
              UNION ALL SELECT l.pk_job, l.pk_layer, l.int_max_cores, l.int_max_gpus FROM rota.layer_resource l) AS k
        WHERE k.pk_job = ANY (ended) AND greatest(k.cores, k.gpus) > 0 GROUP BY 1) AS c
  WHERE d.pk_job = c.pk_job;

  RETURN QUERY
    WITH gone AS (
      DELETE FROM rota.job_resource k WHERE k.pk_job = ANY (ended) AND (k.int_cores, k.int_gpus) = (0, 0)
      RETURNING k.pk_show, k.pk_job
    ), gone_layers AS (
      DELETE FROM rota.layer_resource k WHERE k.pk_job = ANY (ended) AND (k.int_cores, k.int_gpus) = (0, 0)
      RETURNING k.pk_show, k.pk_job
    )
    SELECT g.pk_show, count(DISTINCT g.pk_job) FROM (TABLE gone UNION ALL TABLE gone_layers) AS g GROUP BY 1;
END $$;

-- How many jobs of a show may run at once. Shows without such a limit have no rows here and pay nothing.
ALTER TABLE rota.show ADD COLUMN int_max_jobs integer NOT NULL DEFAULT -1 CHECK (int_max_jobs >= -1);
COMMENT ON COLUMN rota.show.int_max_jobs IS 'Jobs of it that are dispatched or running at a time; -1: as many as there are.';

CREATE TABLE rota.job_slot (
  pk_job   uuid PRIMARY KEY,
  pk_show  uuid NOT NULL,
  ts_taken timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX ON rota.job_slot (pk_show);

COMMENT ON TABLE rota.job_slot IS 'Jobs that were let in under a limit of their show. One counts for as long as its job lives; see job_slots_used.';

-- A job that was let in and of which nothing was booked for a while, because of some other limit, keeps nobody out.
CREATE FUNCTION rota.job_slots_used(of_show uuid) RETURNS bigint
LANGUAGE sql VOLATILE AS $$
  SELECT count(*) FROM rota.job_slot s JOIN rota.job j ON j.pk_job = s.pk_job
  WHERE s.pk_show = of_show AND (
    j.state <> 'SCHEDULED' OR s.ts_taken > clock_timestamp() - interval '30 s'
    OR EXISTS (SELECT FROM rota.proc p WHERE p.pk_job = s.pk_job))
$$;

-- Those of the jobs, in their order, that may run: they run already, were let in before, or there is room for them. The
-- others say why they wait. Two who ask for one show wait for each other; a show without a limit lets all in.
CREATE FUNCTION rota.jobs_let_in(of_show uuid, jobs uuid[]) RETURNS uuid[]
LANGUAGE plpgsql AS $$
DECLARE
  of_all integer := (SELECT nullif(s.int_max_jobs, -1) FROM rota.show s WHERE s.pk_show = of_show);
  by_policy boolean := false;
  let_in uuid[];
  new uuid[] := '{}';
  used bigint;
  asked record;
BEGIN
  by_policy := EXISTS (SELECT FROM rota.job j JOIN rota.policy_word w ON w.word = j.word
                       WHERE j.pk_job = ANY (jobs) AND w.jobs_max IS NOT NULL);
  IF of_all IS NULL AND NOT by_policy
     AND NOT EXISTS (SELECT FROM rota.job_slot s WHERE s.pk_show = of_show) THEN
    RETURN jobs;
  END IF;
  let_in := ARRAY(SELECT s.pk_job FROM rota.job_slot s WHERE s.pk_job = ANY (jobs));
  IF let_in @> jobs THEN
    RETURN let_in;
  END IF;

  PERFORM rota.queue_read_committed();
  PERFORM pg_advisory_xact_lock(1936486260, rota.show_lock_number(of_show));
  DELETE FROM rota.job_slot s WHERE s.pk_show = of_show AND NOT EXISTS (SELECT FROM rota.job j WHERE j.pk_job = s.pk_job);
  INSERT INTO rota.job_slot (pk_job, pk_show)
  SELECT j.pk_job, of_show FROM rota.job j
  WHERE j.state IN ('DISPATCHED', 'RUNNING') AND (j.pk_job = ANY (jobs) OR (by_policy AND j.pk_show = of_show))
  ON CONFLICT DO NOTHING;
  used := rota.job_slots_used(of_show);
  FOR asked IN
    SELECT u.job, least(of_all, w.jobs_max) AS most
    FROM unnest(jobs) WITH ORDINALITY AS u (job, at)
    LEFT JOIN rota.job j ON j.pk_job = u.job LEFT JOIN rota.policy_word w ON w.word = j.word
    WHERE NOT EXISTS (SELECT FROM rota.job_slot s WHERE s.pk_job = u.job) ORDER BY u.at
  LOOP
    IF asked.most IS NULL OR used < asked.most THEN
      new := new || asked.job;
      used := used + 1;
    END IF;
  END LOOP;
  INSERT INTO rota.job_slot (pk_job, pk_show) SELECT job, of_show FROM unnest(new) AS job ON CONFLICT DO NOTHING;

  let_in := ARRAY(SELECT s.pk_job FROM rota.job_slot s WHERE s.pk_job = ANY (jobs));
  UPDATE rota.job j SET reason = waits.reason, ts_updated = clock_timestamp()
  FROM (SELECT w.pk_job, CASE WHEN w.pk_job <> ALL (let_in) THEN 'tenant_limit' END AS reason FROM rota.job w
        WHERE w.pk_job = ANY (jobs) AND (w.pk_job <> ALL (let_in)) <> (w.reason IS NOT DISTINCT FROM 'tenant_limit')
        ORDER BY w.pk_job FOR NO KEY UPDATE) AS waits
  WHERE j.pk_job = waits.pk_job;
  RETURN let_in;
END $$;

-- What runs when a limit comes counts against it.
CREATE FUNCTION rota.show_jobs_limited() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
  IF NEW.int_max_jobs < 0 THEN
    DELETE FROM rota.job_slot s WHERE s.pk_show = NEW.pk_show;
  ELSIF OLD.int_max_jobs < 0 THEN
    INSERT INTO rota.job_slot (pk_job, pk_show)
    SELECT j.pk_job, NEW.pk_show FROM rota.job j
    WHERE j.pk_show = NEW.pk_show AND (j.state IN ('DISPATCHED', 'RUNNING')
                                       OR EXISTS (SELECT FROM rota.proc p WHERE p.pk_job = j.pk_job))
    ON CONFLICT DO NOTHING;
  END IF;
  PERFORM pg_notify('rota_limits', NEW.pk_show::text);
  RETURN NULL;
END $$;

CREATE TRIGGER jobs_limited AFTER UPDATE OF int_max_jobs ON rota.show FOR EACH ROW
  WHEN (OLD.int_max_jobs IS DISTINCT FROM NEW.int_max_jobs) EXECUTE FUNCTION rota.show_jobs_limited();
