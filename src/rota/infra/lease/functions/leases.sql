-- Three row lock strengths separate the parties:
--   guarded transaction    FOR KEY SHARE        allows renewal by the holder, blocks takeover
--   renewal and release    UPDATE (no key)      compatible with guarded transactions
--   takeover               FOR UPDATE           conflicts with all of these; skips instead of waiting

CREATE OR REPLACE FUNCTION rota.lease_acquire(names text[], by text, ttl interval, waiting boolean)
RETURNS TABLE (name text, fence bigint, left_s float8)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  taken text[];
BEGIN
  INSERT INTO rota.lease (name) SELECT DISTINCT n FROM unnest(names) AS n ORDER BY n ON CONFLICT DO NOTHING;

  WITH free AS (
    SELECT l.name FROM rota.lease l
    WHERE l.name = ANY (names) AND (l.expires_at <= clock_timestamp() OR l.holder = by)
    ORDER BY l.name
    FOR UPDATE SKIP LOCKED
  ), granted AS (
    -- A retry with the same `by` after a lost reply finds the existing grant.
    UPDATE rota.lease l
    SET fence = CASE WHEN l.holder = by AND l.expires_at > clock_timestamp() THEN l.fence
                     ELSE nextval('rota.lease_fence') END,
        holder = by, wanted = false,
        acquired_at = clock_timestamp(), expires_at = clock_timestamp() + ttl
    FROM free WHERE l.name = free.name
    RETURNING l.name
  )
  SELECT coalesce(array_agg(granted.name), '{}') INTO taken FROM granted;

  IF waiting THEN
    -- Only a hint, so locked rows are skipped: no batch ever waits for another one.
    UPDATE rota.lease l SET wanted = true
    FROM (SELECT w.name FROM rota.lease w
          WHERE w.name = ANY (names) AND w.name <> ALL (taken) AND NOT w.wanted
          ORDER BY w.name FOR NO KEY UPDATE SKIP LOCKED) AS unmarked
    WHERE l.name = unmarked.name;
  END IF;

  RETURN QUERY
    SELECT l.name, CASE WHEN l.name = ANY (taken) THEN l.fence END,
           CASE WHEN l.expires_at > clock_timestamp()
                THEN extract(epoch FROM l.expires_at - clock_timestamp())::float8 ELSE 0 END
    FROM rota.lease l WHERE l.name = ANY (names);
END $$;

COMMENT ON FUNCTION rota.lease_acquire IS
  'Acquire every free lease among `names`. Returns a row per name; null `fence`: another holder has it for `left_s`.';

CREATE OR REPLACE FUNCTION rota.assert_fence(lease_name text, lease_fence bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
  current record;
BEGIN
  SELECT l.fence, l.expires_at INTO current FROM rota.lease l WHERE l.name = lease_name FOR KEY SHARE;
  -- Compared after the lock, since waiting for it takes time too.
  IF current.fence IS DISTINCT FROM lease_fence OR current.expires_at <= clock_timestamp() THEN
    RAISE EXCEPTION USING
      ERRCODE = 'RT001',
      MESSAGE = format('fence %s of lease %s is stale', lease_fence, lease_name);
  END IF;
END $$;

COMMENT ON FUNCTION rota.assert_fence IS
  'Fail unless this grant is the latest and has not expired; blocks a takeover until the transaction ends.';
