-- The books in PostgreSQL: limits, counters, and the procs they count. See docs/adr/0009-the-books.md.
-- Cores are hundredths of a core in every column; -1 in a cap means that there is none.

-- One counter for every row with limits, so that a version never comes back when a row is deleted and made again.
CREATE SEQUENCE rota.limit_version;

CREATE TABLE rota.show (
  pk_show             uuid PRIMARY KEY,
  str_name            text NOT NULL UNIQUE,
  b_scheduler_managed boolean NOT NULL DEFAULT false,
  int_fence           bigint NOT NULL DEFAULT 1 CHECK (int_fence > 0),
  int_founded         bigint NOT NULL DEFAULT 1 CHECK (int_founded <= int_fence),
  int_version         bigint NOT NULL DEFAULT nextval('rota.limit_version'),
  ts_created          timestamptz NOT NULL DEFAULT now()
);

COMMENT ON COLUMN rota.show.b_scheduler_managed IS 'Whether Redis keeps the live books of this show.';
COMMENT ON COLUMN rota.show.int_fence IS 'Rises when what Redis believed about the show may no longer be used.';
COMMENT ON COLUMN rota.show.int_founded IS
  'Fence at which Redis last had to be seeded; one that was seeded under a lower fence may lack procs.';

CREATE TABLE rota.alloc (
  pk_alloc    uuid PRIMARY KEY,
  str_name    text NOT NULL UNIQUE,
  int_version bigint NOT NULL DEFAULT nextval('rota.limit_version')
);

CREATE TABLE rota.dept (
  pk_dept     uuid PRIMARY KEY,
  str_name    text NOT NULL UNIQUE,
  int_version bigint NOT NULL DEFAULT nextval('rota.limit_version')
);

CREATE TABLE rota.folder (
  pk_folder   uuid PRIMARY KEY,
  pk_show     uuid NOT NULL REFERENCES rota.show ON DELETE CASCADE,
  str_name    text NOT NULL,
  int_version bigint NOT NULL DEFAULT nextval('rota.limit_version'),
  UNIQUE (pk_show, str_name)
);

-- The five tables that count. Half of each page is left free, so that a new count touches no index.
CREATE TABLE rota.subscription (
  pk_subscription uuid PRIMARY KEY,
  pk_show         uuid NOT NULL REFERENCES rota.show ON DELETE CASCADE,
  pk_alloc        uuid NOT NULL REFERENCES rota.alloc,
  int_size        bigint NOT NULL DEFAULT 0 CHECK (int_size >= 0),
  int_burst       bigint NOT NULL DEFAULT 0 CHECK (int_burst >= 0),
  int_gpu_burst   bigint NOT NULL DEFAULT -1 CHECK (int_gpu_burst >= -1),
  int_cores       bigint NOT NULL DEFAULT 0 CHECK (int_cores >= 0),
  int_gpus        bigint NOT NULL DEFAULT 0 CHECK (int_gpus >= 0),
  int_version     bigint NOT NULL DEFAULT nextval('rota.limit_version'),
  UNIQUE (pk_show, pk_alloc)
) WITH (fillfactor = 50);

COMMENT ON COLUMN rota.subscription.int_burst IS 'Hard cap; 0 refuses every core. There is no unlimited burst.';
COMMENT ON COLUMN rota.subscription.int_gpu_burst IS 'Hard cap on GPUs; 0 refuses every GPU, -1 is unlimited.';

CREATE TABLE rota.folder_resource (
  pk_folder     uuid PRIMARY KEY REFERENCES rota.folder ON DELETE CASCADE,
  pk_show       uuid NOT NULL REFERENCES rota.show ON DELETE CASCADE,
  int_min_cores bigint NOT NULL DEFAULT 0 CHECK (int_min_cores >= 0),
  int_max_cores bigint NOT NULL DEFAULT -1 CHECK (int_max_cores >= -1),
  int_min_gpus  bigint NOT NULL DEFAULT 0 CHECK (int_min_gpus >= 0),
  int_max_gpus  bigint NOT NULL DEFAULT -1 CHECK (int_max_gpus >= -1),
  int_cores     bigint NOT NULL DEFAULT 0 CHECK (int_cores >= 0),
  int_gpus      bigint NOT NULL DEFAULT 0 CHECK (int_gpus >= 0),
  int_version   bigint NOT NULL DEFAULT nextval('rota.limit_version')
) WITH (fillfactor = 50);

COMMENT ON COLUMN rota.folder_resource.int_max_cores IS
  'Cap; 0 and -1 are unlimited, here and in the caps of points, jobs and layers.';

CREATE TABLE rota.point (
  pk_show       uuid NOT NULL REFERENCES rota.show ON DELETE CASCADE,
  pk_dept       uuid NOT NULL REFERENCES rota.dept,
  int_min_cores bigint NOT NULL DEFAULT 0 CHECK (int_min_cores >= 0),
  int_max_cores bigint NOT NULL DEFAULT -1 CHECK (int_max_cores >= -1),
  int_min_gpus  bigint NOT NULL DEFAULT 0 CHECK (int_min_gpus >= 0),
  int_max_gpus  bigint NOT NULL DEFAULT -1 CHECK (int_max_gpus >= -1),
  int_cores     bigint NOT NULL DEFAULT 0 CHECK (int_cores >= 0),
  int_gpus      bigint NOT NULL DEFAULT 0 CHECK (int_gpus >= 0),
  int_version   bigint NOT NULL DEFAULT nextval('rota.limit_version'),
  PRIMARY KEY (pk_show, pk_dept)
) WITH (fillfactor = 50);

-- Jobs and layers belong to the engine: their ids are taken as given.
CREATE TABLE rota.job_resource (
  pk_job        uuid PRIMARY KEY,
  pk_show       uuid NOT NULL REFERENCES rota.show ON DELETE CASCADE,
  int_priority  integer NOT NULL DEFAULT 1,
  int_max_cores bigint NOT NULL DEFAULT -1 CHECK (int_max_cores >= -1),
  int_max_gpus  bigint NOT NULL DEFAULT -1 CHECK (int_max_gpus >= -1),
  int_cores     bigint NOT NULL DEFAULT 0 CHECK (int_cores >= 0),
  int_gpus      bigint NOT NULL DEFAULT 0 CHECK (int_gpus >= 0),
  int_version   bigint NOT NULL DEFAULT nextval('rota.limit_version')
) WITH (fillfactor = 50);

CREATE TABLE rota.layer_resource (
  pk_layer      uuid PRIMARY KEY,
  pk_job        uuid NOT NULL,
  pk_show       uuid NOT NULL REFERENCES rota.show ON DELETE CASCADE,
  int_max_cores bigint NOT NULL DEFAULT -1 CHECK (int_max_cores >= -1),
  int_max_gpus  bigint NOT NULL DEFAULT -1 CHECK (int_max_gpus >= -1),
  int_cores     bigint NOT NULL DEFAULT 0 CHECK (int_cores >= 0),
  int_gpus      bigint NOT NULL DEFAULT 0 CHECK (int_gpus >= 0),
  int_version   bigint NOT NULL DEFAULT nextval('rota.limit_version')
) WITH (fillfactor = 50);

-- What is booked. One row per token, with everything it was charged to, so that moving a host or a job in the meantime
-- gives back to the right keys. No index besides the key and no foreign key: both would be paid for by every frame.
CREATE TABLE rota.proc (
  token              bigint PRIMARY KEY CHECK (token >= 0 AND token < 9007199254740992),
  pk_show            uuid NOT NULL,
  pk_alloc           uuid NOT NULL,
  pk_folder          uuid NOT NULL,
  pk_job             uuid NOT NULL,
  pk_layer           uuid NOT NULL,
  pk_dept            uuid NOT NULL,
  pk_host            uuid NOT NULL,
  int_cores_reserved bigint NOT NULL CHECK (int_cores_reserved >= 0),
  int_gpus_reserved  bigint NOT NULL CHECK (int_gpus_reserved >= 0),
  int_fence          bigint NOT NULL,
  ts_booked          timestamptz NOT NULL DEFAULT now()
);

-- Tokens that had their row or will never have one: whoever repeats their booking late finds them here. A grave holds a
-- run of consecutive tokens. Graves of a show and fence never overlap, since a token is buried by the transaction that deletes
-- its row, or under the exclusive lock: hence a token can only lie in the first grave that ends at it or behind it.
-- No foreign key: every release would write to the row of its show.
CREATE TABLE rota.proc_grave (
  pk_show     uuid NOT NULL,
  token_first bigint NOT NULL CHECK (token_first >= 0),
  token_last  bigint NOT NULL CHECK (token_last >= token_first),
  int_fence   bigint NOT NULL,
  ts_buried   timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (pk_show, int_fence, token_last)
);

COMMENT ON COLUMN rota.proc_grave.int_fence IS 'Fence of the show at burial; under a higher one the grave bars nobody, and may go.';

-- A change of limits has a higher version than whatever was published before it.
CREATE FUNCTION rota.limits_changed() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
  NEW.int_version := nextval('rota.limit_version');
  RETURN NEW;
END $$;

CREATE TRIGGER versioned BEFORE UPDATE OF str_name, b_scheduler_managed, int_fence ON rota.show
  FOR EACH ROW EXECUTE FUNCTION rota.limits_changed();
CREATE TRIGGER versioned BEFORE UPDATE OF str_name ON rota.alloc
  FOR EACH ROW EXECUTE FUNCTION rota.limits_changed();
CREATE TRIGGER versioned BEFORE UPDATE OF str_name ON rota.dept
  FOR EACH ROW EXECUTE FUNCTION rota.limits_changed();
CREATE TRIGGER versioned BEFORE UPDATE OF str_name ON rota.folder
  FOR EACH ROW EXECUTE FUNCTION rota.limits_changed();
CREATE TRIGGER versioned BEFORE UPDATE OF int_size, int_burst, int_gpu_burst ON rota.subscription
  FOR EACH ROW EXECUTE FUNCTION rota.limits_changed();
CREATE TRIGGER versioned BEFORE UPDATE OF int_min_cores, int_max_cores, int_min_gpus, int_max_gpus
  ON rota.folder_resource FOR EACH ROW EXECUTE FUNCTION rota.limits_changed();
CREATE TRIGGER versioned BEFORE UPDATE OF int_min_cores, int_max_cores, int_min_gpus, int_max_gpus
  ON rota.point FOR EACH ROW EXECUTE FUNCTION rota.limits_changed();
CREATE TRIGGER versioned BEFORE UPDATE OF int_priority, int_max_cores, int_max_gpus ON rota.job_resource
  FOR EACH ROW EXECUTE FUNCTION rota.limits_changed();
CREATE TRIGGER versioned BEFORE UPDATE OF int_max_cores, int_max_gpus ON rota.layer_resource
  FOR EACH ROW EXECUTE FUNCTION rota.limits_changed();

-- The lock of a show: shared for whoever inserts or deletes procs, exclusive for whoever raises the fence, flips the
-- show or buries tokens. Two numbers, so that it cannot meet the advisory locks of others. A transaction that needs
-- several shows takes them in the order of their ids.
CREATE FUNCTION rota.show_lock_number(of_show uuid) RETURNS integer
LANGUAGE sql IMMUTABLE AS $$ SELECT uuid_hash(of_show) $$;

-- What is read after the lock must be newer than the lock, and only READ COMMITTED takes a snapshot per statement.
CREATE FUNCTION rota.show_read_committed() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  IF current_setting('transaction_isolation') <> 'read committed' THEN
    RAISE EXCEPTION USING ERRCODE = 'RT003', MESSAGE = 'the books are written in READ COMMITTED transactions only';
  END IF;
END $$;

CREATE FUNCTION rota.show_shared(of_show uuid) RETURNS rota.show
LANGUAGE plpgsql AS $$
DECLARE
  held rota.show;
BEGIN
  PERFORM rota.show_read_committed();
  PERFORM pg_advisory_xact_lock_shared(1633903476, rota.show_lock_number(of_show));
  SELECT * INTO held FROM rota.show WHERE pk_show = of_show;
  RETURN held;
END $$;

CREATE FUNCTION rota.show_exclusive(of_show uuid) RETURNS rota.show
LANGUAGE plpgsql AS $$
DECLARE
  held rota.show;
BEGIN
  PERFORM rota.show_read_committed();
  PERFORM pg_advisory_xact_lock(1633903476, rota.show_lock_number(of_show));
  SELECT * INTO held FROM rota.show WHERE pk_show = of_show;
  RETURN held;
END $$;

COMMENT ON FUNCTION rota.show_shared IS
  'Hold the lock of a show shared until the transaction ends; flag and fence as of after the lock, or nulls.';

CREATE FUNCTION rota.show_raise_fence(of_show uuid) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
  risen bigint;
BEGIN
  PERFORM rota.show_exclusive(of_show);
  UPDATE rota.show SET int_fence = int_fence + 1 WHERE pk_show = of_show RETURNING int_fence INTO risen;
  RETURN risen;
END $$;

-- The same for a Redis that has to be seeded: what it knew under a lower fence is not enough any more.
CREATE FUNCTION rota.show_found(of_show uuid) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
  risen bigint := rota.show_raise_fence(of_show);
BEGIN
  UPDATE rota.show SET int_founded = int_fence WHERE pk_show = of_show;
  RETURN risen;
END $$;

-- Triggers, so that what is changed by hand is as safe as what `rota` changes.
CREATE FUNCTION rota.show_changed() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
  PERFORM rota.show_exclusive(OLD.pk_show);
  IF NEW.b_scheduler_managed IS DISTINCT FROM OLD.b_scheduler_managed THEN
    NEW.int_fence := greatest(NEW.int_fence, OLD.int_fence + 1);
    NEW.int_founded := NEW.int_fence;
  END IF;
  RETURN NEW;
END $$;

CREATE TRIGGER locked BEFORE UPDATE OF b_scheduler_managed, int_fence ON rota.show
  FOR EACH ROW EXECUTE FUNCTION rota.show_changed();

CREATE FUNCTION rota.limits_lowered() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
  PERFORM rota.show_raise_fence(OLD.pk_show);
  RETURN NULL;
END $$;

CREATE FUNCTION rota.cap_lowered(before bigint, after bigint) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$ SELECT after > 0 AND (before <= 0 OR after < before) $$;

CREATE TRIGGER lowered AFTER UPDATE OF int_burst, int_gpu_burst ON rota.subscription FOR EACH ROW
  WHEN (NEW.int_burst < OLD.int_burst
        OR NEW.int_gpu_burst >= 0 AND (OLD.int_gpu_burst < 0 OR NEW.int_gpu_burst < OLD.int_gpu_burst))
  EXECUTE FUNCTION rota.limits_lowered();
CREATE TRIGGER lowered AFTER UPDATE OF int_max_cores, int_max_gpus ON rota.folder_resource FOR EACH ROW
  WHEN (rota.cap_lowered(OLD.int_max_cores, NEW.int_max_cores) OR rota.cap_lowered(OLD.int_max_gpus, NEW.int_max_gpus))
  EXECUTE FUNCTION rota.limits_lowered();
CREATE TRIGGER lowered AFTER UPDATE OF int_max_cores, int_max_gpus ON rota.point FOR EACH ROW
  WHEN (rota.cap_lowered(OLD.int_max_cores, NEW.int_max_cores) OR rota.cap_lowered(OLD.int_max_gpus, NEW.int_max_gpus))
  EXECUTE FUNCTION rota.limits_lowered();
CREATE TRIGGER lowered AFTER UPDATE OF int_max_cores, int_max_gpus ON rota.job_resource FOR EACH ROW
  WHEN (rota.cap_lowered(OLD.int_max_cores, NEW.int_max_cores) OR rota.cap_lowered(OLD.int_max_gpus, NEW.int_max_gpus))
  EXECUTE FUNCTION rota.limits_lowered();
CREATE TRIGGER lowered AFTER UPDATE OF int_max_cores, int_max_gpus ON rota.layer_resource FOR EACH ROW
  WHEN (rota.cap_lowered(OLD.int_max_cores, NEW.int_max_cores) OR rota.cap_lowered(OLD.int_max_gpus, NEW.int_max_gpus))
  EXECUTE FUNCTION rota.limits_lowered();

-- What was booked in Redis against a share that is gone must not be inserted either.
CREATE TRIGGER removed AFTER DELETE ON rota.subscription FOR EACH ROW EXECUTE FUNCTION rota.limits_lowered();
CREATE TRIGGER removed AFTER DELETE ON rota.folder_resource FOR EACH ROW EXECUTE FUNCTION rota.limits_lowered();
CREATE TRIGGER removed AFTER DELETE ON rota.point FOR EACH ROW EXECUTE FUNCTION rota.limits_lowered();

-- Frames that ask the same of the same keys, and the consecutive tokens (runs) they own.
CREATE TYPE rota.ledger_group AS (
  pk_alloc uuid, pk_folder uuid, pk_job uuid, pk_layer uuid, pk_dept uuid, pk_host uuid,
  int_cores bigint, int_gpus bigint
);
CREATE TYPE rota.ledger_run AS (owner integer, first bigint, last bigint);

-- A token that got no row from a call, and why.
CREATE TYPE rota.ledger_barred AS (owner integer, token bigint, why text);

-- A run that touches no grave costs one look at the key.
CREATE FUNCTION rota.proc_buried(of_show uuid, runs rota.ledger_run[]) RETURNS TABLE (owner integer, token bigint)
LANGUAGE sql STABLE AS $$
  SELECT run.owner, each.token
  FROM (SELECT s.int_fence AS fence FROM rota.show s WHERE s.pk_show = of_show) AS present
  CROSS JOIN unnest(runs) AS run
  CROSS JOIN LATERAL (SELECT g.token_first FROM rota.proc_grave g
                      WHERE g.pk_show = of_show AND g.int_fence = present.fence AND g.token_last >= run.first
                      ORDER BY g.token_last LIMIT 1) AS nearest
  CROSS JOIN LATERAL generate_series(greatest(run.first, nearest.token_first), run.last) AS each (token)
  WHERE each.token >= (SELECT g.token_first FROM rota.proc_grave g
                       WHERE g.pk_show = of_show AND g.int_fence = present.fence AND g.token_last >= each.token
                       ORDER BY g.token_last LIMIT 1)
$$;

COMMENT ON FUNCTION rota.proc_buried IS 'Those of the tokens that lie in a grave of the show under its present fence.';

CREATE FUNCTION rota.proc_barred(of_show uuid, groups rota.ledger_group[], runs rota.ledger_run[])
RETURNS SETOF rota.ledger_barred
LANGUAGE sql STABLE AS $$
  -- OFFSET 0 keeps the planner from reading the whole table for many short runs: one range of the key per run.
  SELECT run.owner, p.token,
         CASE WHEN (p.pk_show, p.pk_alloc, p.pk_folder, p.pk_job, p.pk_layer, p.pk_dept, p.pk_host,
                    p.int_cores_reserved, p.int_gpus_reserved)
                 = (of_show, asked.pk_alloc, asked.pk_folder, asked.pk_job, asked.pk_layer, asked.pk_dept,
                    asked.pk_host, asked.int_cores, asked.int_gpus)
              THEN 'already' ELSE 'duplicate' END
  FROM unnest(runs) AS run
  CROSS JOIN LATERAL (SELECT * FROM rota.proc WHERE token BETWEEN run.first AND run.last OFFSET 0) AS p
  CROSS JOIN LATERAL (SELECT (groups[run.owner]).*) AS asked
  UNION ALL
  SELECT b.owner, b.token, 'tombstoned' FROM rota.proc_buried(of_show, runs) AS b
  WHERE NOT EXISTS (SELECT FROM rota.proc p WHERE p.token = b.token)
$$;

COMMENT ON FUNCTION rota.proc_barred IS
  'Tokens that cannot be inserted: there with the same charge (already) or another one (duplicate), or buried.';

-- An answer for every token when the whole batch is refused. Rows that are there stay there and are told as such: if
-- they were called refused, the caller would give back in Redis what is still booked here.
CREATE FUNCTION rota.proc_refused(of_show uuid, groups rota.ledger_group[], runs rota.ledger_run[], reason text)
RETURNS SETOF rota.ledger_barred
LANGUAGE sql STABLE AS $$
  SELECT run.owner, each.token, coalesce(barred.why, reason)
  FROM unnest(runs) AS run
  CROSS JOIN LATERAL generate_series(run.first, run.last) AS each (token)
  LEFT JOIN rota.proc_barred(of_show, groups, runs) AS barred ON barred.token = each.token
$$;

CREATE FUNCTION rota.proc_insert(of_show uuid, fence bigint, groups rota.ledger_group[], runs rota.ledger_run[])
RETURNS SETOF rota.ledger_barred
LANGUAGE plpgsql AS $$
DECLARE
  held rota.show := rota.show_shared(of_show);
  barred rota.ledger_barred[] := '{}';
  left_out bigint[] := '{}';
  tries integer := 0;
BEGIN
  IF held.b_scheduler_managed IS NOT TRUE OR held.int_fence <> fence THEN
    RETURN QUERY SELECT * FROM rota.proc_refused(of_show, groups, runs, CASE
      WHEN held.pk_show IS NULL THEN 'unknown_show'
      WHEN NOT held.b_scheduler_managed THEN 'not_managed' ELSE 'stale_fence' END);
    RETURN;
  END IF;

  LOOP
    BEGIN
      INSERT INTO rota.proc
      SELECT each.token, of_show, asked.pk_alloc, asked.pk_folder, asked.pk_job, asked.pk_layer, asked.pk_dept,
             asked.pk_host, asked.int_cores, asked.int_gpus, fence, now()
      FROM unnest(runs) AS run
      JOIN unnest(groups) WITH ORDINALITY AS asked ON asked.ordinality = run.owner
      CROSS JOIN LATERAL generate_series(run.first, run.last) AS each (token)
      WHERE cardinality(left_out) = 0 OR each.token <> ALL (left_out);
      -- Looked at last: the insert waits for whoever is just deleting such a row, and then finds the place free.
      EXIT WHEN NOT EXISTS (SELECT FROM rota.proc_buried(of_show, runs) AS b WHERE b.token <> ALL (left_out));
      RAISE unique_violation;
    EXCEPTION WHEN unique_violation THEN
      -- A batch that was sent before: look what became of it. Whoever inserted or deleted it has committed by now.
      tries := tries + 1;
      IF tries > 8 THEN
        RAISE;
      END IF;
      SELECT coalesce(array_agg(b), '{}'), coalesce(array_agg(b.token), '{}') INTO barred, left_out
      FROM rota.proc_barred(of_show, groups, runs) AS b;
    END;
  END LOOP;
  RETURN QUERY SELECT * FROM unnest(barred);
END $$;

COMMENT ON FUNCTION rota.proc_insert IS
  'Insert what was booked in Redis under `fence`. A row for each token that was not inserted now, and why.';

-- Runs of consecutive tokens; one that is given twice is there once.
CREATE FUNCTION rota.proc_runs(tokens bigint[]) RETURNS TABLE (first bigint, last bigint)
LANGUAGE sql IMMUTABLE AS $$
  SELECT min(given.token), max(given.token)
  FROM (SELECT t.token, t.token - dense_rank() OVER (ORDER BY t.token) AS run FROM unnest(tokens) AS t (token)) AS given
  GROUP BY given.run
$$;

-- The conflict is a row made by hand for a buried token: it must not keep anything from being released.
CREATE FUNCTION rota.proc_dig(of_show uuid, fence bigint, firsts bigint[], lasts bigint[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO rota.proc_grave (pk_show, token_first, token_last, int_fence)
  SELECT of_show, run.first, run.last, fence FROM unnest(firsts, lasts) AS run (first, last)
  ON CONFLICT (pk_show, int_fence, token_last)
    DO UPDATE SET token_first = least(proc_grave.token_first, excluded.token_first);
END $$;

CREATE FUNCTION rota.proc_bury(of_show uuid, tokens bigint[]) RETURNS SETOF bigint
LANGUAGE plpgsql AS $$
DECLARE
  held rota.show := rota.show_exclusive(of_show);
  runs rota.ledger_run[] := ARRAY(SELECT ROW(0, r.first, r.last)::rota.ledger_run FROM rota.proc_runs(tokens) AS r);
BEGIN
  IF held.pk_show IS NOT NULL THEN
    PERFORM rota.proc_dig(of_show, held.int_fence, array_agg(r.first), array_agg(r.last))
    FROM rota.proc_runs(ARRAY(SELECT unnest(tokens)
                              EXCEPT SELECT p.token FROM rota.proc p WHERE p.token = ANY (tokens)
                              EXCEPT SELECT b.token FROM rota.proc_buried(of_show, runs) AS b)) AS r;
  END IF;
  RETURN QUERY SELECT b.token FROM rota.proc_buried(of_show, runs) AS b;
END $$;

COMMENT ON FUNCTION rota.proc_bury IS
  'See to it that these tokens never have a proc row; those that have one are left out of the answer.';

CREATE TYPE rota.ledger_key AS (level integer, id uuid, max_cores bigint, max_gpus bigint, cores bigint, gpus bigint);

-- Every row a batch counts in, locked in one order for all batches: level by level, by id within a level. Rows of jobs,
-- layers and points that are not there yet are made first; a maker waits only for makers, and nobody who holds a lock
-- of this level waits for them, so this closes no circle.
CREATE FUNCTION rota.ledger_keys(of_show uuid, groups rota.ledger_group[]) RETURNS SETOF rota.ledger_key
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

-- Adds what the groups say to all five levels; negative to give back. The caller holds the rows (rota.ledger_keys).
-- A count that was wrong before stops at 0, since a release must not fail for it; the recompute finds it.
CREATE FUNCTION rota.ledger_add(of_show uuid, groups rota.ledger_group[]) RETURNS void
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

-- `caps` and `used` hold cores and GPUs of key n at 2n-1 and 2n; a cap of null is no limit. rota.model.quota decides
-- the same way in Python; a property test holds the two together.
CREATE FUNCTION rota.ledger_fit(
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

CREATE FUNCTION rota.ledger_book(of_show uuid, groups rota.ledger_group[], runs rota.ledger_run[], force boolean)
RETURNS TABLE (
  owner integer, token bigint, why text, fit bigint, level integer, resource integer, current bigint, cap bigint
)
-- Small batches would be planned anew each time, for nearly as long as booking them takes.
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan AS $$
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

  SELECT array_agg(k) INTO keys FROM rota.ledger_keys(of_show, groups) AS k;
  SELECT array_agg(each.cap ORDER BY k.ordinality, each.r), array_agg(each.used ORDER BY k.ordinality, each.r)
  INTO caps, used
  FROM unnest(keys) WITH ORDINALITY AS k
  CROSS JOIN LATERAL (VALUES (1, k.max_cores, k.cores), (2, k.max_gpus, k.gpus)) AS each (r, cap, used);
  -- Read after the rows are held: a repeat of this batch by somebody else has ended, one way or the other.
  SELECT coalesce(array_agg(b), '{}'), coalesce(array_agg(b.token), '{}') INTO barred, left_out
  FROM rota.proc_barred(of_show, groups, runs) AS b;
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
    ORDER BY g.ordinality
  LOOP
    why := NULL;
    IF array_position(asked.keys, NULL) IS NOT NULL THEN
      -- Nowhere to count it: the folder or the department is unknown, or belongs to another show.
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
           g.int_cores, g.int_gpus, held.int_fence, now()
    FROM (SELECT run.owner, each.token,
                 row_number() OVER (PARTITION BY run.owner ORDER BY run.ordinality, each.token) AS nth
          FROM unnest(runs) WITH ORDINALITY AS run
          CROSS JOIN LATERAL generate_series(run.first, run.last) AS each (token)
          WHERE cardinality(left_out) = 0 OR each.token <> ALL (left_out)) AS frame
    JOIN unnest(groups) WITH ORDINALITY AS g ON g.ordinality = frame.owner
    WHERE frame.nth <= fits[frame.owner];
    IF EXISTS (SELECT FROM rota.proc_buried(of_show, runs) AS b WHERE b.token <> ALL (left_out)) THEN
      RAISE unique_violation USING MESSAGE = 'a token was booked on other keys and released in the meantime';
    END IF;
  END IF;
END $$;

COMMENT ON FUNCTION rota.ledger_book IS
  'Book on the five tables: a row per group with how many of it fit and what refused the next; a row per barred token.';

-- Rows are deleted run by run along the key, in the order of `firsts` (ascending), so that two releases of the same
-- tokens wait for each other and never in a circle: hence no other way through the table. Locking in order first would
-- cost twice as much.
CREATE FUNCTION rota.proc_delete(of_show uuid, firsts bigint[], lasts bigint[])
RETURNS TABLE (
  managed boolean, fence bigint, pk_alloc uuid, pk_folder uuid, pk_job uuid, pk_layer uuid, pk_dept uuid,
  cores bigint, gpus bigint, tokens bigint[]
)
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
  held rota.show := rota.show_shared(of_show);
  freed record;
  given_back rota.ledger_group[] := '{}';
  gone bigint[] := '{}';
  asked bigint;
BEGIN
  managed := held.b_scheduler_managed IS TRUE;
  fence := coalesce(held.int_fence, 0);
  FOR freed IN
    WITH deleted AS (
      DELETE FROM rota.proc p
      USING unnest(firsts, lasts) AS run (first, last)
      WHERE p.token BETWEEN run.first AND run.last AND p.pk_show = of_show
      RETURNING p.*
    )
    SELECT d.pk_alloc, d.pk_folder, d.pk_job, d.pk_layer, d.pk_dept, d.int_cores_reserved AS cores,
           d.int_gpus_reserved AS gpus, array_agg(d.token ORDER BY d.token) AS tokens
    FROM deleted AS d GROUP BY 1, 2, 3, 4, 5, 6, 7
  LOOP
    pk_alloc := freed.pk_alloc;
    pk_folder := freed.pk_folder;
    pk_job := freed.pk_job;
    pk_layer := freed.pk_layer;
    pk_dept := freed.pk_dept;
    cores := freed.cores;
    gpus := freed.gpus;
    tokens := freed.tokens;
    RETURN NEXT;
    gone := gone || tokens;
    IF NOT managed THEN
      given_back := given_back || ROW(pk_alloc, pk_folder, pk_job, pk_layer, pk_dept, NULL,
                                      -cores * cardinality(tokens), -gpus * cardinality(tokens))::rota.ledger_group;
    END IF;
  END LOOP;

  IF cardinality(gone) > 0 THEN
    -- Where all were there, which is the rule, the runs asked for are the graves.
    SELECT sum(run.last - run.first + 1) INTO asked FROM unnest(firsts, lasts) AS run (first, last);
    IF cardinality(gone) < asked THEN
      SELECT array_agg(r.first), array_agg(r.last) INTO firsts, lasts FROM rota.proc_runs(gone) AS r;
    END IF;
    PERFORM rota.proc_dig(of_show, fence, firsts, lasts);
  END IF;
  IF held.b_scheduler_managed IS FALSE AND cardinality(given_back) > 0 THEN
    PERFORM rota.ledger_keys(of_show, given_back);
    PERFORM rota.ledger_add(of_show, given_back);
  END IF;
END $$;

COMMENT ON FUNCTION rota.proc_delete IS
  'Delete and bury procs of a show; what an unmanaged one held is given back. A row per charge with its tokens.';

CREATE FUNCTION rota.ledger_sums(of_show uuid) RETURNS rota.ledger_group[]
LANGUAGE sql STABLE AS $$
  SELECT coalesce(array_agg(
    ROW(s.pk_alloc, s.pk_folder, s.pk_job, s.pk_layer, s.pk_dept, NULL, s.cores, s.gpus)::rota.ledger_group), '{}')
  FROM (SELECT p.pk_alloc, p.pk_folder, p.pk_job, p.pk_layer, p.pk_dept,
               sum(p.int_cores_reserved)::bigint AS cores, sum(p.int_gpus_reserved)::bigint AS gpus
        FROM rota.proc p WHERE p.pk_show = of_show GROUP BY 1, 2, 3, 4, 5) AS s
$$;

-- Sets each counter of the show that has a row to what `sums` say, drained ones to 0, in the order of ledger_keys.
CREATE FUNCTION rota.ledger_rewrite(of_show uuid, sums rota.ledger_group[])
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

-- For a show that Redis does not keep. The exclusive lock waits until every booking and release under way has ended, so
-- their counts and their rows are both there or both not. Rows that say nothing are removed, lest every job there ever
-- was keeps one; booking makes them again.
CREATE FUNCTION rota.ledger_recompute(of_show uuid) RETURNS TABLE (level integer, changed bigint)
LANGUAGE plpgsql AS $$
DECLARE
  held rota.show := rota.show_exclusive(of_show);
  sums rota.ledger_group[] := rota.ledger_sums(of_show);
BEGIN
  IF held.b_scheduler_managed IS FALSE THEN
    PERFORM rota.ledger_keys(of_show, sums);
    RETURN QUERY SELECT * FROM rota.ledger_rewrite(of_show, sums);
    DELETE FROM rota.job_resource k
    WHERE k.pk_show = of_show AND greatest(k.int_max_cores, k.int_max_gpus) <= 0
      AND (k.int_priority, k.int_cores, k.int_gpus) = (1, 0, 0);
    DELETE FROM rota.layer_resource k
    WHERE k.pk_show = of_show AND greatest(k.int_max_cores, k.int_max_gpus) <= 0
      AND (k.int_cores, k.int_gpus) = (0, 0);
  END IF;
END $$;

-- For a show that Redis keeps: its tables only show what it uses, as of one read of the procs. Nothing is made for the
-- many jobs without a row. The lock is for the flag: were the show given back meanwhile, this would spoil its books.
CREATE FUNCTION rota.ledger_mirror(of_show uuid) RETURNS TABLE (level integer, changed bigint)
LANGUAGE plpgsql AS $$
DECLARE
  sums rota.ledger_group[] := rota.ledger_sums(of_show);
  held rota.show := rota.show_shared(of_show);
BEGIN
  IF held.b_scheduler_managed IS TRUE THEN
    RETURN QUERY SELECT * FROM rota.ledger_rewrite(of_show, sums);
  END IF;
END $$;

-- Flag and fence in one step. Coming back to PostgreSQL, the five tables are exact before anybody can book on them.
CREATE FUNCTION rota.show_set_managed(of_show uuid, managed boolean)
RETURNS TABLE (was boolean, fence bigint, version bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  held rota.show := rota.show_exclusive(of_show);
BEGIN
  IF held.b_scheduler_managed IS DISTINCT FROM managed THEN
    UPDATE rota.show SET b_scheduler_managed = managed WHERE pk_show = of_show;
    IF NOT managed THEN
      PERFORM rota.ledger_recompute(of_show);
    END IF;
  END IF;
  RETURN QUERY SELECT held.b_scheduler_managed, s.int_fence, s.int_version FROM rota.show s WHERE s.pk_show = of_show;
END $$;
