-- What Redis shows of sagas, and what is forgotten of runs. See docs/adr/0021-workflows.md.

ALTER TABLE rota.saga ADD COLUMN fence bigint NOT NULL DEFAULT 0;

COMMENT ON COLUMN rota.saga.fence IS 'Rises with every change of the saga or its entries: what Redis is told names it.';

CREATE FUNCTION rota.saga_changes() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
  NEW.fence := OLD.fence + 1;
  RETURN NEW;
END $$;

CREATE TRIGGER saga_changes BEFORE UPDATE ON rota.saga FOR EACH ROW EXECUTE FUNCTION rota.saga_changes();

-- By number, as everybody who locks several sagas.
CREATE FUNCTION rota.saga_entries_change() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
  UPDATE rota.saga s SET fence = s.fence
  FROM (SELECT s.pk_saga FROM rota.saga s WHERE s.pk_saga IN (SELECT c.pk_saga FROM changed c)
        ORDER BY s.pk_saga FOR NO KEY UPDATE) AS l
  WHERE s.pk_saga = l.pk_saga;
  RETURN NULL;
END $$;

CREATE TRIGGER saga_entries_recorded AFTER INSERT ON rota.saga_entry REFERENCING NEW TABLE AS changed
  FOR EACH STATEMENT EXECUTE FUNCTION rota.saga_entries_change();
CREATE TRIGGER saga_entries_changed AFTER UPDATE ON rota.saga_entry REFERENCING NEW TABLE AS changed
  FOR EACH STATEMENT EXECUTE FUNCTION rota.saga_entries_change();

-- What ended long ago is found by when it did.
CREATE INDEX ON rota.workflow_run (ts_ended) WHERE ts_ended IS NOT NULL;
CREATE INDEX ON rota.saga (ts_ended) WHERE ts_ended IS NOT NULL;
