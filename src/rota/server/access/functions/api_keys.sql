CREATE OR REPLACE FUNCTION rota.api_grants(of_key text) RETURNS text LANGUAGE sql STABLE AS $$
  SELECT coalesce(json_agg(json_build_object(
           'role', g.role,
           'show', CASE WHEN g.b_every THEN NULL ELSE json_build_object('id', s.pk_show, 'name', s.str_name) END)
         ORDER BY s.str_name NULLS FIRST), '[]')::text
  FROM rota.api_grant g LEFT JOIN rota.show s ON s.pk_show = g.pk_show
  WHERE g.key_id = of_key AND (g.b_every OR s.pk_show IS NOT NULL)
$$;

COMMENT ON FUNCTION rota.api_grants IS 'Grants of a key, as JSON, with the current names of shows.';

CREATE OR REPLACE FUNCTION rota.api_key_state(key rota.api_key) RETURNS text LANGUAGE sql VOLATILE AS $$
  SELECT CASE WHEN key.ts_revoked IS NOT NULL
                OR EXISTS (SELECT FROM rota.principal p WHERE p.id = key.principal_id AND p.ts_disabled IS NOT NULL)
              THEN 'revoked'
              WHEN key.ts_expires <= clock_timestamp() THEN 'expired'
              ELSE 'active' END
$$;

COMMENT ON FUNCTION rota.api_key_state IS
  'Servers that know no principals refuse the keys of a disabled one as revoked.';

-- Invalidate the key caches of all processes. Updates of ts_last_used do not notify.
CREATE OR REPLACE FUNCTION rota.api_keys_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_notify('rota_keys', '');
  RETURN NULL;
END $$;

CREATE OR REPLACE TRIGGER told AFTER INSERT OR DELETE OR TRUNCATE OR UPDATE OF digest, name, ts_expires, ts_revoked ON rota.api_key
  FOR EACH STATEMENT EXECUTE FUNCTION rota.api_keys_changed();

CREATE OR REPLACE TRIGGER told AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON rota.api_grant
  FOR EACH STATEMENT EXECUTE FUNCTION rota.api_keys_changed();

CREATE OR REPLACE TRIGGER told_to_keys AFTER UPDATE OF str_name ON rota.show
  FOR EACH STATEMENT EXECUTE FUNCTION rota.api_keys_changed();
