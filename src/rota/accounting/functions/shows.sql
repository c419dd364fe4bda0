-- The show lock: shared to insert or delete procs, exclusive to raise the fence, flip the show or tombstone tokens. Two
-- numbers, so that it cannot collide with other advisory locks. A transaction that needs several shows locks them in
-- the order of their ids.
CREATE OR REPLACE FUNCTION rota.show_lock_number(of_show uuid) RETURNS integer
LANGUAGE sql IMMUTABLE AS $$ SELECT uuid_hash(of_show) $$;

-- Reads after the lock must be newer than the lock, and only READ COMMITTED takes a snapshot per statement.
CREATE OR REPLACE FUNCTION rota.show_read_committed() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  IF current_setting('transaction_isolation') <> 'read committed' THEN
    RAISE EXCEPTION USING ERRCODE = 'RT003', MESSAGE = 'the books are written in READ COMMITTED transactions only';
  END IF;
END $$;

CREATE OR REPLACE FUNCTION rota.show_shared(of_show uuid) RETURNS rota.show
LANGUAGE plpgsql AS $$
DECLARE
  held rota.show;
BEGIN
  PERFORM rota.show_read_committed();
  PERFORM pg_advisory_xact_lock_shared(1633903476, rota.show_lock_number(of_show));
  SELECT * INTO held FROM rota.show WHERE pk_show = of_show;
  RETURN held;
END $$;

CREATE OR REPLACE FUNCTION rota.show_exclusive(of_show uuid) RETURNS rota.show
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
  'Lock a show in shared mode until the transaction ends. Returns its row as read after the lock, or nulls.';

CREATE OR REPLACE FUNCTION rota.show_raise_fence(of_show uuid) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
  risen bigint;
BEGIN
  PERFORM rota.show_exclusive(of_show);
  UPDATE rota.show SET int_fence = int_fence + 1 WHERE pk_show = of_show RETURNING int_fence INTO risen;
  RETURN risen;
END $$;

-- The same for a Redis that must be seeded: its state under a lower fence is no longer sufficient.
CREATE OR REPLACE FUNCTION rota.show_found(of_show uuid) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
  risen bigint := rota.show_raise_fence(of_show);
BEGIN
  UPDATE rota.show SET int_founded = int_fence WHERE pk_show = of_show;
  RETURN risen;
END $$;

-- Triggers, so that manual changes are as safe as those made by `rota`.
CREATE OR REPLACE FUNCTION rota.show_changed() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
  PERFORM rota.show_exclusive(OLD.pk_show);
  IF NEW.b_scheduler_managed IS DISTINCT FROM OLD.b_scheduler_managed THEN
    NEW.int_fence := greatest(NEW.int_fence, OLD.int_fence + 1);
    NEW.int_founded := NEW.int_fence;
  END IF;
  RETURN NEW;
END $$;

CREATE OR REPLACE TRIGGER locked BEFORE UPDATE OF b_scheduler_managed, int_fence ON rota.show
  FOR EACH ROW EXECUTE FUNCTION rota.show_changed();

-- Sets flag and fence in one step. When a show returns to PostgreSQL, its five tables are exact before it can be
-- booked. When Redis takes it over, the rows of ended jobs go first: each would become a hash, before the first booking.
CREATE OR REPLACE FUNCTION rota.show_set_managed(of_show uuid, managed boolean)
RETURNS TABLE (was boolean, fence bigint, version bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  held rota.show := rota.show_exclusive(of_show);
BEGIN
  IF held.b_scheduler_managed IS DISTINCT FROM managed THEN
    UPDATE rota.show SET b_scheduler_managed = managed WHERE pk_show = of_show;
    IF managed THEN
      PERFORM rota.ledger_forget_unused(of_show);
    ELSE
      PERFORM rota.ledger_recompute(of_show);
    END IF;
  END IF;
  RETURN QUERY SELECT held.b_scheduler_managed, s.int_fence, s.int_version FROM rota.show s WHERE s.pk_show = of_show;
END $$;
