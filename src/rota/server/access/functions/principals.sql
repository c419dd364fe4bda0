-- Older servers add keys without a principal: each gets a new one, never that of another key.
CREATE OR REPLACE FUNCTION rota.api_key_principal() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO rota.principal (name, kind, b_global) VALUES (NEW.name, 'service', false)
  ON CONFLICT (name) DO NOTHING RETURNING id INTO NEW.principal_id;
  IF NEW.principal_id IS NULL THEN
    INSERT INTO rota.principal (name, kind, b_global, shared_name)
    VALUES (left(NEW.name, 20) || '-' || NEW.id || '-' || md5(random()::text), 'service', false, NEW.name)
    RETURNING id INTO NEW.principal_id;
  END IF;
  RETURN NEW;
END $$;

CREATE OR REPLACE TRIGGER has_principal BEFORE INSERT ON rota.api_key
  FOR EACH ROW WHEN (NEW.principal_id IS NULL) EXECUTE FUNCTION rota.api_key_principal();

CREATE OR REPLACE FUNCTION rota.principal_kept() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'principals are never renamed or deleted' USING ERRCODE = 'integrity_constraint_violation';
END $$;

CREATE OR REPLACE TRIGGER kept BEFORE DELETE OR TRUNCATE OR UPDATE OF id, name, kind, b_global, shared_name
  ON rota.principal FOR EACH STATEMENT EXECUTE FUNCTION rota.principal_kept();

CREATE OR REPLACE TRIGGER told AFTER UPDATE OF ts_disabled ON rota.principal
  FOR EACH STATEMENT EXECUTE FUNCTION rota.api_keys_changed();

CREATE OR REPLACE FUNCTION rota.principal_active(given text) RETURNS boolean LANGUAGE sql VOLATILE AS $$
  SELECT coalesce((SELECT p.ts_disabled IS NULL FROM rota.principal p WHERE p.name = given FOR SHARE), true)
$$;

COMMENT ON FUNCTION rota.principal_active IS
  'False if the principal is disabled. Otherwise it is not disabled before the transaction ends.';
