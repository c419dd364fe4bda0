-- Keys that an older server added between migration 0033 and the trigger.
WITH other AS MATERIALIZED (
  SELECT id, name, ts_created, gen_random_uuid() AS principal FROM rota.api_key WHERE principal_id IS NULL
), added AS (
  INSERT INTO rota.principal (id, name, kind, b_global, shared_name, ts_created)
  SELECT principal, left(name, 20) || '-' || id || '-' || md5(random()::text), 'service', false, name, ts_created FROM other
)
UPDATE rota.api_key k SET principal_id = other.principal FROM other WHERE k.id = other.id;

ALTER TABLE rota.api_key ADD CONSTRAINT api_key_has_principal CHECK (principal_id IS NOT NULL) NOT VALID;
