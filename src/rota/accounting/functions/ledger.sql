-- Locks every row that a batch counts in, in one order for all batches: by level, then by id. Missing rows of jobs,
-- layers and points are created first; a creator waits only for creators, and no holder of a lock of this level waits
-- for them, so this cannot deadlock.
CREATE OR REPLACE FUNCTION rota.ledger_keys(of_show uuid, groups rota.ledger_group[]) RETURNS SETOF rota.ledger_key
LANGUAGE plpgsql AS $$
BEGIN
  RETURN QUERY
    SELECT 1, s.pk_alloc, s.int_burst, CASE WHEN s.int_gpu_burst >= 0 THEN s.int_gpu_burst END, s.int_cores, s.int_gpus
    FROM rota.subscription s
    WHERE s.pk_show = of_show AND s.pk_alloc = ANY (ARRAY(SELECT g.pk_alloc FROM unnest(groups) AS g))
    ORDER BY s.pk_alloc FOR NO KEY UPDATE;

  RETURN QUERY
    SELECT 2, f.pk_folder, CASE WHEN f.int_max_cores > 0 THEN f.int_max_cores END,
           CASE WHEN f.int_max_gpus > 0 THEN f.int_max_gpus END, f.int_cores, f.int_gpus
    FROM rota.folder_resource f
    WHERE f.pk_show = of_show AND f.pk_folder = ANY (ARRAY(SELECT g.pk_folder FROM unnest(groups) AS g))
    ORDER BY f.pk_folder FOR NO KEY UPDATE;

  INSERT INTO rota.job_resource (pk_job, pk_show)
  SELECT DISTINCT g.pk_job, of_show FROM unnest(groups) AS g
  WHERE NOT EXISTS (SELECT FROM rota.job_resource j WHERE j.pk_job = g.pk_job)
  ORDER BY g.pk_job ON CONFLICT DO NOTHING;
  RETURN QUERY
    SELECT 3, j.pk_job, CASE WHEN j.int_max_cores > 0 THEN j.int_max_cores END,
           CASE WHEN j.int_max_gpus > 0 THEN j.int_max_gpus END, j.int_cores, j.int_gpus
    FROM rota.job_resource j
    WHERE j.pk_show = of_show AND j.pk_job = ANY (ARRAY(SELECT g.pk_job FROM unnest(groups) AS g))
    ORDER BY j.pk_job FOR NO KEY UPDATE;

  INSERT INTO rota.layer_resource (pk_layer, pk_job, pk_show)
  SELECT DISTINCT ON (g.pk_layer) g.pk_layer, g.pk_job, of_show FROM unnest(groups) AS g
  WHERE NOT EXISTS (SELECT FROM rota.layer_resource l WHERE l.pk_layer = g.pk_layer)
  ORDER BY g.pk_layer ON CONFLICT DO NOTHING;
  RETURN QUERY
    SELECT 4, l.pk_layer, CASE WHEN l.int_max_cores > 0 THEN l.int_max_cores END,
           CASE WHEN l.int_max_gpus > 0 THEN l.int_max_gpus END, l.int_cores, l.int_gpus
    FROM rota.layer_resource l
    WHERE l.pk_show = of_show AND l.pk_layer = ANY (ARRAY(SELECT g.pk_layer FROM unnest(groups) AS g))
    ORDER BY l.pk_layer FOR NO KEY UPDATE;

  INSERT INTO rota.point (pk_show, pk_dept)
  SELECT DISTINCT of_show, g.pk_dept FROM unnest(groups) AS g JOIN rota.dept d ON d.pk_dept = g.pk_dept
  WHERE NOT EXISTS (SELECT FROM rota.point p WHERE p.pk_show = of_show AND p.pk_dept = g.pk_dept)
  ORDER BY g.pk_dept ON CONFLICT DO NOTHING;
  RETURN QUERY
    SELECT 5, p.pk_dept, CASE WHEN p.int_max_cores > 0 THEN p.int_max_cores END,
           CASE WHEN p.int_max_gpus > 0 THEN p.int_max_gpus END, p.int_cores, p.int_gpus
    FROM rota.point p
    WHERE p.pk_show = of_show AND p.pk_dept = ANY (ARRAY(SELECT g.pk_dept FROM unnest(groups) AS g))
    ORDER BY p.pk_dept FOR NO KEY UPDATE;
END $$;

-- Adds the amounts of the groups to all five levels; negative amounts release. The caller holds the rows
-- (rota.ledger_keys). A counter that was wrong before stops at 0, since a release must not fail for it; the recompute
-- corrects it.
CREATE OR REPLACE FUNCTION rota.ledger_add(of_show uuid, groups rota.ledger_group[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  UPDATE rota.subscription k
  SET int_cores = greatest(0, k.int_cores + d.cores), int_gpus = greatest(0, k.int_gpus + d.gpus)
  FROM (SELECT g.pk_alloc, sum(g.int_cores)::bigint AS cores, sum(g.int_gpus)::bigint AS gpus
        FROM unnest(groups) AS g GROUP BY 1) AS d
  WHERE k.pk_show = of_show AND k.pk_alloc = d.pk_alloc;

  UPDATE rota.folder_resource k
  SET int_cores = greatest(0, k.int_cores + d.cores), int_gpus = greatest(0, k.int_gpus + d.gpus)
  FROM (SELECT g.pk_folder, sum(g.int_cores)::bigint AS cores, sum(g.int_gpus)::bigint AS gpus
        FROM unnest(groups) AS g GROUP BY 1) AS d
  WHERE k.pk_show = of_show AND k.pk_folder = d.pk_folder;

  UPDATE rota.job_resource k
  SET int_cores = greatest(0, k.int_cores + d.cores), int_gpus = greatest(0, k.int_gpus + d.gpus)
  FROM (SELECT g.pk_job, sum(g.int_cores)::bigint AS cores, sum(g.int_gpus)::bigint AS gpus
        FROM unnest(groups) AS g GROUP BY 1) AS d
  WHERE k.pk_show = of_show AND k.pk_job = d.pk_job;

  UPDATE rota.layer_resource k
  SET int_cores = greatest(0, k.int_cores + d.cores), int_gpus = greatest(0, k.int_gpus + d.gpus)
  FROM (SELECT g.pk_layer, sum(g.int_cores)::bigint AS cores, sum(g.int_gpus)::bigint AS gpus
        FROM unnest(groups) AS g GROUP BY 1) AS d
  WHERE k.pk_show = of_show AND k.pk_layer = d.pk_layer;

  UPDATE rota.point k
  SET int_cores = greatest(0, k.int_cores + d.cores), int_gpus = greatest(0, k.int_gpus + d.gpus)
  FROM (SELECT g.pk_dept, sum(g.int_cores)::bigint AS cores, sum(g.int_gpus)::bigint AS gpus
        FROM unnest(groups) AS g GROUP BY 1) AS d
  WHERE k.pk_show = of_show AND k.pk_dept = d.pk_dept;
END $$;

-- `caps` and `used` hold cores and GPUs of key n at 2n-1 and 2n; a null cap means no limit. rota.model.quota decides
-- the same way in Python; a property test compares the two.
CREATE OR REPLACE FUNCTION rota.ledger_fit(
  wanted bigint, ask bigint[], keys integer[], caps bigint[], used bigint[],
  OUT fit bigint, OUT level integer, OUT resource integer, OUT current bigint, OUT cap bigint
)
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
  slot integer;
  room bigint;
BEGIN
  fit := wanted;
  FOR r IN 1..2 LOOP
    CONTINUE WHEN ask[r] = 0;
    FOR n IN 1..5 LOOP
      slot := 2 * (keys[n] - 1) + r;
      CONTINUE WHEN caps[slot] IS NULL;
      room := greatest(0, (caps[slot] - used[slot]) / ask[r]);
      IF room < fit THEN
        fit := room;
        level := n;
        resource := r;
      END IF;
    END LOOP;
  END LOOP;
  IF level IS NOT NULL THEN
    slot := 2 * (keys[level] - 1) + resource;
    cap := caps[slot];
    current := used[slot] + fit * ask[resource];
  END IF;
END $$;

-- `series_firsts` and `carriers`: as in `proc_insert`. Frames of a series are booked with their carrier, or not at all.
CREATE OR REPLACE FUNCTION rota.ledger_book(
  of_show uuid, groups rota.ledger_group[], runs rota.ledger_run[], force boolean, series_firsts bigint[], carriers bigint[]
) RETURNS TABLE (
  owner integer, token bigint, why text, fit bigint, level integer, resource integer, current bigint, cap bigint
)
-- Plans of small batches are cached: planning would take nearly as long as booking. A locked show is tried again later
-- (`rota.accounting.show_isolation`).
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET lock_timeout = '500ms' AS $$
#variable_conflict use_column
DECLARE
  held rota.show := rota.show_shared(of_show);
  keys rota.ledger_key[];
  barred rota.ledger_barred[];
  left_out bigint[];
  caps bigint[];
  used bigint[];
  fits bigint[] := '{}';
  decided record;
  asked record;
BEGIN
  IF held.b_scheduler_managed IS NOT FALSE THEN
    RETURN QUERY
      SELECT r.owner, r.token, r.why, 0::bigint, 0, 0, 0::bigint, 0::bigint
      FROM rota.proc_refused(of_show, groups, runs,
                             CASE WHEN held.pk_show IS NULL THEN 'unknown_show' ELSE 'managed' END) AS r;
    RETURN;
  END IF;

  SELECT array_agg(k) INTO keys FROM rota.ledger_keys(of_show, ARRAY(
    SELECT ROW(g.pk_alloc, g.pk_folder, g.pk_job, g.pk_layer, g.pk_dept, g.pk_host, g.int_cores, g.int_gpus)::rota.ledger_group
    FROM unnest(groups) AS g WHERE g.int_cores > 0 OR g.int_gpus > 0)) AS k;
  SELECT array_agg(each.cap ORDER BY k.ordinality, each.r), array_agg(each.used ORDER BY k.ordinality, each.r)
  INTO caps, used
  FROM unnest(keys) WITH ORDINALITY AS k
  CROSS JOIN LATERAL (VALUES (1, k.max_cores, k.cores), (2, k.max_gpus, k.gpus)) AS each (r, cap, used);
  -- Read after the rows are locked: a concurrent repeat of this batch has ended by then.
  SELECT coalesce(array_agg(b), '{}'), coalesce(array_agg(b.token), '{}') INTO barred, left_out
  FROM rota.proc_barred_series(of_show, groups, runs, series_firsts, carriers) AS b;
  IF cardinality(barred) > 0 THEN
    RETURN QUERY SELECT b.owner, b.token, b.why, 0::bigint, 0, 0, 0::bigint, 0::bigint FROM unnest(barred) AS b;
  END IF;

  FOR asked IN
    SELECT g.ordinality::integer AS place, ARRAY[g.int_cores, g.int_gpus] AS ask,
           coalesce(frames.number, 0) AS wanted,
           ARRAY[k1.ordinality, k2.ordinality, k3.ordinality, k4.ordinality, k5.ordinality]::integer[] AS keys
    FROM unnest(groups) WITH ORDINALITY AS g
    LEFT JOIN (SELECT run.owner, count(*) AS number FROM unnest(runs) AS run
               CROSS JOIN LATERAL generate_series(run.first, run.last) AS each (token)
               WHERE cardinality(left_out) = 0 OR each.token <> ALL (left_out) GROUP BY 1) AS frames
      ON frames.owner = g.ordinality
    LEFT JOIN unnest(keys) WITH ORDINALITY AS k1 ON k1.level = 1 AND k1.id = g.pk_alloc
    LEFT JOIN unnest(keys) WITH ORDINALITY AS k2 ON k2.level = 2 AND k2.id = g.pk_folder
    LEFT JOIN unnest(keys) WITH ORDINALITY AS k3 ON k3.level = 3 AND k3.id = g.pk_job
    LEFT JOIN unnest(keys) WITH ORDINALITY AS k4 ON k4.level = 4 AND k4.id = g.pk_layer
    LEFT JOIN unnest(keys) WITH ORDINALITY AS k5 ON k5.level = 5 AND k5.id = g.pk_dept
    WHERE g.int_cores > 0 OR g.int_gpus > 0
    ORDER BY g.ordinality
  LOOP
    why := NULL;
    IF array_position(asked.keys, NULL) IS NOT NULL THEN
      -- Nowhere to count it: the folder or department is unknown, or belongs to another show.
      fit := 0;
      why := (ARRAY['no_subscription', 'unknown_folder', 'unknown_job', 'unknown_layer', 'unknown_dept'])
             [array_position(asked.keys, NULL)];
    ELSIF force THEN
      fit := asked.wanted;
    ELSE
      SELECT * INTO decided FROM rota.ledger_fit(asked.wanted, asked.ask, asked.keys, caps, used);
      fit := decided.fit;
      level := decided.level;
      resource := decided.resource;
      current := decided.current;
      cap := decided.cap;
    END IF;
    fits := fits || fit;
    IF fit > 0 THEN
      FOR n IN 1..5 LOOP
        used[2 * asked.keys[n] - 1] := used[2 * asked.keys[n] - 1] + fit * asked.ask[1];
        used[2 * asked.keys[n]] := used[2 * asked.keys[n]] + fit * asked.ask[2];
      END LOOP;
    END IF;
    owner := asked.place;
    token := NULL;
    RETURN NEXT;
    level := NULL;
    resource := NULL;
    current := NULL;
    cap := NULL;
  END LOOP;

  IF 0 < ANY (fits) THEN
    PERFORM rota.ledger_add(of_show, ARRAY(
      SELECT ROW(g.pk_alloc, g.pk_folder, g.pk_job, g.pk_layer, g.pk_dept, g.pk_host,
                 g.int_cores * fits[g.ordinality], g.int_gpus * fits[g.ordinality])::rota.ledger_group
      FROM unnest(groups) WITH ORDINALITY AS g WHERE fits[g.ordinality] > 0));
    INSERT INTO rota.proc
    SELECT frame.token, of_show, g.pk_alloc, g.pk_folder, g.pk_job, g.pk_layer, g.pk_dept, g.pk_host,
           g.int_cores, g.int_gpus, held.int_fence, now(), series.first
    FROM (SELECT run.owner, each.token,
                 row_number() OVER (PARTITION BY run.owner ORDER BY run.ordinality, each.token) AS nth
          FROM unnest(runs) WITH ORDINALITY AS run
          CROSS JOIN LATERAL generate_series(run.first, run.last) AS each (token)
          WHERE cardinality(left_out) = 0 OR each.token <> ALL (left_out)) AS frame
    JOIN unnest(groups) WITH ORDINALITY AS g ON g.ordinality = frame.owner
    LEFT JOIN unnest(series_firsts, carriers) AS series (first, carrier) ON series.carrier = frame.token
    WHERE frame.nth <= fits[frame.owner];
    IF cardinality(carriers) > 0 THEN
      INSERT INTO rota.proc
      SELECT each.token, of_show, g.pk_alloc, g.pk_folder, g.pk_job, g.pk_layer, g.pk_dept, g.pk_host, 0, 0, held.int_fence,
             now()
      FROM unnest(series_firsts, carriers) AS series (first, carrier)
      JOIN rota.proc c ON c.token = series.carrier
      JOIN unnest(runs) AS run ON run.first < series.carrier AND run.last >= series.first
      JOIN unnest(groups) WITH ORDINALITY AS g ON g.ordinality = run.owner AND g.int_cores = 0 AND g.int_gpus = 0
      CROSS JOIN LATERAL generate_series(greatest(run.first, series.first), least(run.last, series.carrier - 1)) AS each (token)
      WHERE cardinality(left_out) = 0 OR each.token <> ALL (left_out);
    END IF;
    IF EXISTS (SELECT FROM rota.proc_buried(of_show, runs) AS b WHERE b.token <> ALL (left_out)) THEN
      RAISE unique_violation USING MESSAGE = 'a token was booked on other keys and released in the meantime';
    END IF;
  END IF;
END $$;

COMMENT ON FUNCTION rota.ledger_book(uuid, rota.ledger_group[], rota.ledger_run[], boolean, bigint[], bigint[]) IS
  'Book in the five tables. A row per group (how many fit, which cap refused the next), and a row per barred token.';

-- For servers of an older version, which book no series.
CREATE OR REPLACE FUNCTION rota.ledger_book(of_show uuid, groups rota.ledger_group[], runs rota.ledger_run[], force boolean)
RETURNS TABLE (
  owner integer, token bigint, why text, fit bigint, level integer, resource integer, current bigint, cap bigint
)
LANGUAGE sql AS $$
  SELECT * FROM rota.ledger_book(of_show, groups, runs, force, '{}'::bigint[], '{}'::bigint[])
$$;

CREATE OR REPLACE FUNCTION rota.ledger_sums(of_show uuid) RETURNS rota.ledger_group[]
LANGUAGE sql STABLE AS $$
  SELECT coalesce(array_agg(
    ROW(s.pk_alloc, s.pk_folder, s.pk_job, s.pk_layer, s.pk_dept, NULL, s.cores, s.gpus)::rota.ledger_group), '{}')
  FROM (SELECT p.pk_alloc, p.pk_folder, p.pk_job, p.pk_layer, p.pk_dept,
               sum(p.int_cores_reserved)::bigint AS cores, sum(p.int_gpus_reserved)::bigint AS gpus
        FROM rota.proc p WHERE p.pk_show = of_show GROUP BY 1, 2, 3, 4, 5) AS s
$$;

-- Sets each counter of the show that has a row to its value in `sums`, or to 0, in the order of ledger_keys.
CREATE OR REPLACE FUNCTION rota.ledger_rewrite(of_show uuid, sums rota.ledger_group[])
RETURNS TABLE (level integer, changed bigint)
LANGUAGE plpgsql AS $$
DECLARE
  counting record;
BEGIN
  FOR counting IN
    SELECT * FROM unnest(ARRAY['subscription', 'folder_resource', 'job_resource', 'layer_resource', 'point'],
                         ARRAY['pk_alloc', 'pk_folder', 'pk_job', 'pk_layer', 'pk_dept'])
      WITH ORDINALITY AS t (name, key, level)
  LOOP
    EXECUTE format($sql$
      WITH wrong AS (
        SELECT k.%2$I AS id, coalesce(d.cores, 0) AS cores, coalesce(d.gpus, 0) AS gpus
        FROM rota.%1$I k
        LEFT JOIN (SELECT g.%2$I AS id, sum(g.int_cores)::bigint AS cores, sum(g.int_gpus)::bigint AS gpus
                   FROM unnest($2) AS g GROUP BY 1) AS d ON d.id = k.%2$I
        WHERE k.pk_show = $1 AND (k.int_cores, k.int_gpus) <> (coalesce(d.cores, 0), coalesce(d.gpus, 0))
        ORDER BY k.%2$I FOR NO KEY UPDATE OF k
      )
      UPDATE rota.%1$I k SET int_cores = w.cores, int_gpus = w.gpus
      FROM wrong w WHERE k.pk_show = $1 AND k.%2$I = w.id
    $sql$, counting.name, counting.key) USING of_show, sums;
    GET DIAGNOSTICS changed = ROW_COUNT;
    level := counting.level;
    RETURN NEXT;
  END LOOP;
END $$;

-- Removes the rows of jobs and layers without usage and caps, so that those of ended jobs do not accumulate; booking
-- creates them again. The caller holds the exclusive lock of the unmanaged show, whose counters are exact.
CREATE OR REPLACE FUNCTION rota.ledger_forget_unused(of_show uuid) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  DELETE FROM rota.job_resource k
  WHERE k.pk_show = of_show AND greatest(k.int_max_cores, k.int_max_gpus) <= 0
    AND (k.int_priority, k.int_cores, k.int_gpus) = (1, 0, 0);
  DELETE FROM rota.layer_resource k
  WHERE k.pk_show = of_show AND greatest(k.int_max_cores, k.int_max_gpus) <= 0
    AND (k.int_cores, k.int_gpus) = (0, 0);
END $$;

-- For an unmanaged show. The exclusive lock waits for every booking and release in flight, so that their counts and
-- rows are either both visible or both not.
CREATE OR REPLACE FUNCTION rota.ledger_recompute(of_show uuid) RETURNS TABLE (level integer, changed bigint)
LANGUAGE plpgsql AS $$
DECLARE
  held rota.show := rota.show_exclusive(of_show);
  sums rota.ledger_group[] := rota.ledger_sums(of_show);
BEGIN
  IF held.b_scheduler_managed IS FALSE THEN
    PERFORM rota.ledger_keys(of_show, sums);
    RETURN QUERY SELECT * FROM rota.ledger_rewrite(of_show, sums);
    PERFORM rota.ledger_forget_unused(of_show);
  END IF;
END $$;

-- For a managed show: its tables only display usage, from one read of the procs. Jobs without a row get none. The lock
-- protects the flag: if the show became unmanaged meanwhile, this would corrupt its counters.
CREATE OR REPLACE FUNCTION rota.ledger_mirror(of_show uuid) RETURNS TABLE (level integer, changed bigint)
LANGUAGE plpgsql AS $$
DECLARE
  sums rota.ledger_group[] := rota.ledger_sums(of_show);
  held rota.show := rota.show_shared(of_show);
BEGIN
  IF held.b_scheduler_managed IS TRUE THEN
    RETURN QUERY SELECT * FROM rota.ledger_rewrite(of_show, sums);
  END IF;
END $$;
