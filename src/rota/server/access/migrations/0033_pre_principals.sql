-- People and services; API keys belong to them. Each key gets a principal of its name. Keys that share a name may be of
-- different people: the oldest keeps the name and the others get NAME-KEYID, so that none gains a right.
CREATE TABLE rota.principal (
  id          uuid PRIMARY KEY DEFAULT gen_random_uuid(),
  name        text NOT NULL UNIQUE CHECK (length(name) BETWEEN 1 AND 64 AND strpos(name, ':') = 0),
  kind        text NOT NULL CHECK (kind IN ('person', 'service')),
  b_global    boolean NOT NULL,
  shared_name text,
  ts_created  timestamptz NOT NULL DEFAULT now(),
  ts_disabled timestamptz
);

COMMENT ON COLUMN rota.principal.name IS 'Never changed and never given to another principal.';

COMMENT ON COLUMN rota.principal.b_global IS 'Created by an admin of every show; only these can be named as approvers.';

COMMENT ON COLUMN rota.principal.shared_name IS
  'The former name of its key, if others had it too: what was done under it counts as done by this principal as well.';

COMMENT ON COLUMN rota.principal.ts_disabled IS 'Disabled for good, with all keys. Rows are kept, so that names stay taken.';

-- Locks the keys until the commit: no older server adds one meanwhile. Later ones get a principal by a trigger
-- (functions/principals.sql).
ALTER TABLE rota.api_key ADD COLUMN principal_id uuid;

ALTER TABLE rota.api_key ADD CONSTRAINT api_key_principal FOREIGN KEY (principal_id) REFERENCES rota.principal NOT VALID;

INSERT INTO rota.principal (name, kind, b_global, ts_created)
SELECT DISTINCT ON (name) name, 'service', true, ts_created FROM rota.api_key ORDER BY name, ts_created, id;

UPDATE rota.api_key k SET principal_id = p.id
FROM (SELECT DISTINCT ON (name) id, name FROM rota.api_key ORDER BY name, ts_created, id) oldest
JOIN rota.principal p ON p.name = oldest.name
WHERE k.id = oldest.id;

INSERT INTO rota.principal (name, kind, b_global, shared_name, ts_created)
SELECT left(name, 53) || '-' || id, 'service', false, name, ts_created FROM rota.api_key WHERE principal_id IS NULL
ON CONFLICT (name) DO NOTHING;

UPDATE rota.api_key k SET principal_id = p.id FROM rota.principal p
WHERE k.principal_id IS NULL AND p.name = left(k.name, 53) || '-' || k.id AND p.shared_name = k.name;

-- Another key is named NAME-KEYID of this one.
WITH other AS MATERIALIZED (
  SELECT id, name, ts_created, gen_random_uuid() AS principal FROM rota.api_key WHERE principal_id IS NULL
), added AS (
  INSERT INTO rota.principal (id, name, kind, b_global, shared_name, ts_created)
  SELECT principal, left(name, 20) || '-' || id || '-' || md5(random()::text), 'service', false, name, ts_created FROM other
)
UPDATE rota.api_key k SET principal_id = other.principal FROM other WHERE k.id = other.id;
