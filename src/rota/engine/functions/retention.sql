-- Partitions of a table without its default; `day` is in UTC.
CREATE OR REPLACE FUNCTION rota.days_of(of_table text) RETURNS TABLE (name text, day date, since timestamptz, until timestamptz)
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

CREATE OR REPLACE FUNCTION rota.day_column(of_table text) RETURNS name
LANGUAGE sql STABLE AS $$
  SELECT a.attname FROM pg_partitioned_table p
  JOIN pg_attribute a ON a.attrelid = p.partrelid AND a.attnum = p.partattrs[0]
  WHERE p.partrelid = to_regclass('rota.' || quote_ident(of_table))
$$;

-- Days of which the default partition has rows.
CREATE OR REPLACE FUNCTION rota.days_astray(of_table text, most integer) RETURNS SETOF date
LANGUAGE plpgsql AS $$
BEGIN
  RETURN QUERY EXECUTE format(
    'SELECT DISTINCT (d.%I AT TIME ZONE ''UTC'')::date AS day FROM rota.%I d ORDER BY day LIMIT %s',
    rota.day_column(of_table), of_table || '_default', most);
END $$;

-- Creates the partition of a day, or of the rest of it. Rows of the day in the default partition move there in the same
-- transaction, at most `most` at a time plus those of the same instant: then the partition ends with them ('part'), and
-- the next call creates one for the rest. 'there': the day is complete; 'again': nothing could be done yet. A reader
-- that planned with the old partitions would miss moved rows, so readers are blocked while rows move; usually there are
-- none, and only users of the default partition wait. For a day that has begun writers are blocked too: a writer that
-- chose the default partition before would be rejected by it afterwards.
CREATE OR REPLACE FUNCTION rota.day_make(of_table text, of_day date, most integer) RETURNS text
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
    RETURN 'again';  -- rows arrived during the wait
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

CREATE OR REPLACE FUNCTION rota.day_drop(of_table text, of_day date) RETURNS integer
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

-- Moves ends of frames whose job is live, or is kept for longer than their day, to the day of their job, or to today.
-- Nothing can be added to a past day, so when this finds nothing, the day may be dropped.
CREATE OR REPLACE FUNCTION rota.frame_ends_carry(of_day date, most integer) RETURNS bigint
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

CREATE OR REPLACE FUNCTION rota.caps_forget(most integer) RETURNS TABLE (pk_show uuid, jobs bigint)
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

-- Tables that have grown to several times the size of their statistics. Those of the queue's ring have fixed plans.
-- Sessions report rows with a delay; pages are known at once, but do not tell how many of them are free.
CREATE OR REPLACE FUNCTION rota.tables_grown(growth integer, rows_min integer) RETURNS SETOF text
LANGUAGE sql AS $$
  SELECT c.oid::regclass::text FROM pg_class c
  WHERE c.relnamespace = 'rota'::regnamespace AND c.relkind = 'r'
    AND c.relname !~ '^(ready_entries|queue_claims|queue_closures)_'
    AND (pg_stat_get_live_tuples(c.oid) > growth * greatest(c.reltuples, 0) + rows_min
         OR pg_relation_size(c.oid) / 8192 > growth * c.relpages + rows_min / 40)
$$;

-- Renews the statistics of a table, unless it is locked or was dropped meanwhile. A small sample tells its size; it is
-- wanted while the table grows fast, when every millisecond is missed elsewhere.
CREATE OR REPLACE FUNCTION rota.table_analyze(name text) RETURNS void
LANGUAGE plpgsql SET default_statistics_target = 10 AS $$
BEGIN
  IF to_regclass(name) IS NOT NULL THEN
    EXECUTE format('ANALYZE (SKIP_LOCKED) %s', to_regclass(name));
  END IF;
EXCEPTION WHEN undefined_table THEN
  NULL;
END $$;
