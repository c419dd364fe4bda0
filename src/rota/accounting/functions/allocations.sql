-- A range without tombstones costs one index lookup.
CREATE OR REPLACE FUNCTION rota.proc_buried(of_show uuid, runs rota.ledger_run[]) RETURNS TABLE (owner integer, token bigint)
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

COMMENT ON FUNCTION rota.proc_buried IS
  'Those of the tokens that have a tombstone of the show under its current fence.';

CREATE OR REPLACE FUNCTION rota.proc_barred(of_show uuid, groups rota.ledger_group[], runs rota.ledger_run[])
RETURNS SETOF rota.ledger_barred
LANGUAGE sql STABLE AS $$
  -- OFFSET 0 keeps the planner from reading the whole table for many short ranges: one index range scan per range.
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
  'Tokens that cannot be inserted: booked with the same charge (already) or another (duplicate), or tombstoned.';

-- One row per token when the whole batch is refused. Existing rows are reported as such: if they were reported as
-- refused, the caller would release in Redis what is still booked here.
CREATE OR REPLACE FUNCTION rota.proc_refused(of_show uuid, groups rota.ledger_group[], runs rota.ledger_run[], reason text)
RETURNS SETOF rota.ledger_barred
LANGUAGE sql STABLE AS $$
  SELECT run.owner, each.token, coalesce(barred.why, reason)
  FROM unnest(runs) AS run
  CROSS JOIN LATERAL generate_series(run.first, run.last) AS each (token)
  LEFT JOIN rota.proc_barred(of_show, groups, runs) AS barred ON barred.token = each.token
$$;

-- As `proc_barred`; without its carrier no frame of a series may have a row, since nothing would be charged for it.
CREATE OR REPLACE FUNCTION rota.proc_barred_series(
  of_show uuid, groups rota.ledger_group[], runs rota.ledger_run[], series_firsts bigint[], carriers bigint[]
) RETURNS SETOF rota.ledger_barred
LANGUAGE plpgsql STABLE AS $$
DECLARE
  barred rota.ledger_barred[] := ARRAY(SELECT b FROM rota.proc_barred(of_show, groups, runs) AS b);
BEGIN
  RETURN QUERY SELECT * FROM unnest(barred);
  IF cardinality(carriers) = 0 THEN
    RETURN;
  END IF;
  RETURN QUERY
    SELECT run.owner, each.token, lost.why
    FROM unnest(series_firsts, carriers) AS series (first, carrier)
    JOIN unnest(barred) AS lost ON lost.token = series.carrier AND lost.why <> 'already'
    JOIN unnest(runs) AS run ON run.first <= series.carrier - 1 AND run.last >= series.first
    CROSS JOIN LATERAL generate_series(greatest(run.first, series.first), least(run.last, series.carrier - 1)) AS each (token)
    WHERE each.token <> ALL (ARRAY(SELECT b.token FROM unnest(barred) AS b));
END $$;

-- Of each series the last frame, the carrier, has the charge, and is in a group of its own; the others are in groups that
-- ask for nothing. No other row ever has a token from `series_first` to `carrier`. A locked show is tried again later (`rota.accounting.show_isolation`):
-- dispatch of the others must not wait for it.
CREATE OR REPLACE FUNCTION rota.proc_insert(
  of_show uuid, fence bigint, groups rota.ledger_group[], runs rota.ledger_run[], series_firsts bigint[], carriers bigint[]
) RETURNS SETOF rota.ledger_barred
LANGUAGE plpgsql SET lock_timeout = '500ms'
-- Planned once per session, with lookups by key: see `frames_succeed_each`.
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
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
             asked.pk_host, asked.int_cores, asked.int_gpus, fence, now(), series.first
      FROM unnest(runs) AS run
      JOIN unnest(groups) WITH ORDINALITY AS asked ON asked.ordinality = run.owner
      CROSS JOIN LATERAL generate_series(run.first, run.last) AS each (token)
      LEFT JOIN unnest(series_firsts, carriers) AS series (first, carrier) ON series.carrier = each.token
      WHERE cardinality(left_out) = 0 OR each.token <> ALL (left_out);
      -- Checked last: the insert waits for a concurrent deletion of such a row and then succeeds.
      EXIT WHEN NOT EXISTS (SELECT FROM rota.proc_buried(of_show, runs) AS b WHERE b.token <> ALL (left_out));
      RAISE unique_violation;
    EXCEPTION WHEN unique_violation THEN
      -- A repeated batch: report its outcome. The transaction that inserted or deleted it has committed by now.
      tries := tries + 1;
      IF tries > 8 THEN
        RAISE;
      END IF;
      SELECT coalesce(array_agg(b), '{}'), coalesce(array_agg(b.token), '{}') INTO barred, left_out
      FROM rota.proc_barred_series(of_show, groups, runs, series_firsts, carriers) AS b;
    END;
  END LOOP;
  RETURN QUERY SELECT * FROM unnest(barred);
END $$;

COMMENT ON FUNCTION rota.proc_insert(uuid, bigint, rota.ledger_group[], rota.ledger_run[], bigint[], bigint[]) IS
  'Insert bookings made in Redis under `fence`. Returns a row, with the reason, per token that was not inserted.';

-- For servers of an older version, which book no series.
CREATE OR REPLACE FUNCTION rota.proc_insert(of_show uuid, fence bigint, groups rota.ledger_group[], runs rota.ledger_run[])
RETURNS SETOF rota.ledger_barred
LANGUAGE sql AS $$ SELECT * FROM rota.proc_insert(of_show, fence, groups, runs, '{}'::bigint[], '{}'::bigint[]) $$;

-- Ranges of consecutive tokens; duplicates are merged.
CREATE OR REPLACE FUNCTION rota.proc_runs(tokens bigint[]) RETURNS TABLE (first bigint, last bigint)
LANGUAGE sql IMMUTABLE AS $$
  SELECT min(given.token), max(given.token)
  FROM (SELECT t.token, t.token - dense_rank() OVER (ORDER BY t.token) AS run FROM unnest(tokens) AS t (token)) AS given
  GROUP BY given.run
$$;

-- The conflict is a row made by hand for a tombstoned token: it must not block a release.
CREATE OR REPLACE FUNCTION rota.proc_dig(of_show uuid, fence bigint, firsts bigint[], lasts bigint[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO rota.proc_grave (pk_show, token_first, token_last, int_fence)
  SELECT of_show, run.first, run.last, fence FROM unnest(firsts, lasts) AS run (first, last)
  ON CONFLICT (pk_show, int_fence, token_last)
    DO UPDATE SET token_first = least(proc_grave.token_first, excluded.token_first);
END $$;

CREATE OR REPLACE FUNCTION rota.proc_bury(of_show uuid, tokens bigint[]) RETURNS SETOF bigint
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
  'Tombstone tokens, so that they never get a proc row. Skips tokens with a row; returns the others.';

-- Series that the ranges touch: those that begin before the end of a range and end after its beginning.
CREATE OR REPLACE FUNCTION rota.proc_carriers(firsts bigint[], lasts bigint[]) RETURNS bigint[]
LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
  IF NOT EXISTS (SELECT FROM rota.proc c WHERE c.series_first IS NOT NULL) THEN
    RETURN '{}';
  END IF;
  RETURN ARRAY(
    SELECT c.token FROM unnest(firsts, lasts) AS run (first, last)
    JOIN rota.proc c ON c.token BETWEEN run.first AND run.last AND c.series_first IS NOT NULL
    UNION
    SELECT next.token FROM unnest(firsts, lasts) AS run (first, last)
    CROSS JOIN LATERAL (SELECT c.token, c.series_first FROM rota.proc c WHERE c.token > run.last AND c.series_first IS NOT NULL
                        ORDER BY c.token LIMIT 1) AS next
    WHERE next.series_first <= run.last);
END $$;

-- Rows are deleted range by range along the key, in the order of `firsts` (ascending), so that two releases of the same
-- tokens cannot deadlock: no other access path is allowed. Locking in order first would cost twice as much.
--
-- The row of a carrier holds the charge of its series, so it goes with the last of the series' rows, whatever ends that
-- one. Normally its own frame is the last; otherwise the row stays, marked as ended. Transactions that end frames of one
-- series take turns: each locks the carriers of all its series first, in the order of tokens.
CREATE OR REPLACE FUNCTION rota.proc_end(of_show uuid, firsts bigint[], lasts bigint[]) RETURNS SETOF rota.proc_ended
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
  held rota.show := rota.show_shared(of_show);
  carriers bigint[] := rota.proc_carriers(firsts, lasts);
  freed rota.proc_ended;
  outcomes rota.proc_ended[];
  given_back rota.ledger_group[] := '{}';
  gone bigint[] := '{}';
  asked bigint;
BEGIN
  IF cardinality(carriers) > 0 THEN
    PERFORM FROM rota.proc c WHERE c.token = ANY (carriers) AND c.pk_show = of_show ORDER BY c.token FOR UPDATE;
  END IF;
  WITH deleted AS (
    DELETE FROM rota.proc p
    USING unnest(firsts, lasts) AS run (first, last)
    WHERE p.token BETWEEN run.first AND run.last AND p.pk_show = of_show AND p.series_first IS NULL
    RETURNING p.*
  ), charges AS (
    SELECT ROW(held.b_scheduler_managed IS TRUE, coalesce(held.int_fence, 0), d.pk_alloc, d.pk_folder, d.pk_job,
               d.pk_layer, d.pk_dept, d.int_cores_reserved, d.int_gpus_reserved, array_agg(d.token ORDER BY d.token),
               NULL)::rota.proc_ended AS each
    FROM deleted AS d GROUP BY d.pk_alloc, d.pk_folder, d.pk_job, d.pk_layer, d.pk_dept, d.int_cores_reserved,
                               d.int_gpus_reserved
  ) SELECT coalesce(array_agg(c.each), '{}') INTO outcomes FROM charges AS c;
  IF cardinality(carriers) > 0 THEN
    outcomes := outcomes || ARRAY(SELECT e FROM rota.proc_end_carriers(held, carriers, firsts, lasts) AS e);
  END IF;

  FOREACH freed IN ARRAY outcomes LOOP
    freed.ended := coalesce(freed.ended, freed.tokens);
    RETURN NEXT freed;
    gone := gone || freed.tokens;
    IF NOT freed.managed AND (freed.cores > 0 OR freed.gpus > 0) THEN
      given_back := given_back || ROW(freed.pk_alloc, freed.pk_folder, freed.pk_job, freed.pk_layer, freed.pk_dept, NULL,
                                      -freed.cores * cardinality(freed.tokens),
                                      -freed.gpus * cardinality(freed.tokens))::rota.ledger_group;
    END IF;
  END LOOP;

  IF cardinality(gone) > 0 THEN
    -- Usually all rows existed and went; then the requested ranges are the tombstones.
    SELECT sum(run.last - run.first + 1) INTO asked FROM unnest(firsts, lasts) AS run (first, last);
    IF cardinality(gone) <> asked OR cardinality(carriers) > 0 THEN
      SELECT array_agg(r.first), array_agg(r.last) INTO firsts, lasts FROM rota.proc_runs(gone) AS r;
    END IF;
    PERFORM rota.proc_dig(of_show, coalesce(held.int_fence, 0), firsts, lasts);
  END IF;
  IF held.b_scheduler_managed IS FALSE AND cardinality(given_back) > 0 THEN
    PERFORM rota.ledger_keys(of_show, given_back);
    PERFORM rota.ledger_add(of_show, given_back);
  END IF;
END $$;

COMMENT ON FUNCTION rota.proc_end IS
  'End frames of a show: delete and tombstone their procs; decrement the counters if it is unmanaged.';

-- Locked carriers whose frames end now (those in the ranges) or have ended: deletes those whose series has no other row,
-- marks the others as ended.
CREATE OR REPLACE FUNCTION rota.proc_end_carriers(held rota.show, carriers bigint[], firsts bigint[], lasts bigint[])
RETURNS SETOF rota.proc_ended
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
  ending bigint[] := ARRAY(SELECT c FROM unnest(carriers) AS c WHERE EXISTS (
    SELECT FROM unnest(firsts, lasts) AS run (first, last) WHERE c BETWEEN run.first AND run.last));
BEGIN
  RETURN QUERY
    WITH deleted AS (
      DELETE FROM rota.proc c
      WHERE c.token = ANY (carriers) AND c.pk_show = held.pk_show AND (c.b_ended OR c.token = ANY (ending))
        AND NOT EXISTS (SELECT FROM rota.proc f WHERE f.token >= c.series_first AND f.token < c.token)
      RETURNING c.*
    )
    SELECT held.b_scheduler_managed IS TRUE, coalesce(held.int_fence, 0), d.pk_alloc, d.pk_folder, d.pk_job, d.pk_layer,
           d.pk_dept, d.int_cores_reserved, d.int_gpus_reserved, array_agg(d.token ORDER BY d.token),
           coalesce(array_agg(d.token ORDER BY d.token) FILTER (WHERE NOT d.b_ended), '{}')
    FROM deleted AS d GROUP BY d.pk_alloc, d.pk_folder, d.pk_job, d.pk_layer, d.pk_dept, d.int_cores_reserved,
                               d.int_gpus_reserved;
  IF cardinality(ending) > 0 THEN
    RETURN QUERY
      UPDATE rota.proc c SET b_ended = true
      WHERE c.token = ANY (ending) AND c.pk_show = held.pk_show AND NOT c.b_ended
      RETURNING held.b_scheduler_managed IS TRUE, coalesce(held.int_fence, 0), c.pk_alloc, c.pk_folder, c.pk_job,
                c.pk_layer, c.pk_dept, c.int_cores_reserved, c.int_gpus_reserved, '{}'::bigint[], ARRAY[c.token];
  END IF;
END $$;

-- Rows that were deleted, by what they were charged to.
CREATE OR REPLACE FUNCTION rota.proc_delete(of_show uuid, firsts bigint[], lasts bigint[])
RETURNS TABLE (
  managed boolean, fence bigint, pk_alloc uuid, pk_folder uuid, pk_job uuid, pk_layer uuid, pk_dept uuid,
  cores bigint, gpus bigint, tokens bigint[]
)
LANGUAGE sql AS $$
  SELECT e.managed, e.fence, e.pk_alloc, e.pk_folder, e.pk_job, e.pk_layer, e.pk_dept, e.cores, e.gpus, e.tokens
  FROM rota.proc_end(of_show, firsts, lasts) AS e WHERE cardinality(e.tokens) > 0
$$;

COMMENT ON FUNCTION rota.proc_delete IS
  'Delete and tombstone procs of a show; decrement the counters if it is unmanaged. Returns tokens per charge.';
