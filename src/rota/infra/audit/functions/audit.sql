-- Each field is preceded by its length in bytes, so that no two different rows have the same concatenation.
CREATE OR REPLACE FUNCTION rota.audit_field(field bytea) RETURNS bytea
LANGUAGE sql IMMUTABLE AS $$ SELECT int8send(octet_length(field)) || field $$;

CREATE OR REPLACE FUNCTION rota.audit_hash(
  seq bigint, at timestamptz, actor text, action text, target text, detail jsonb, prev_hash bytea
) RETURNS bytea
LANGUAGE sql STABLE AS $$
  SELECT sha256(
    rota.audit_field(prev_hash)
    || rota.audit_field(int8send(seq))
    || rota.audit_field(int8send((extract(epoch FROM at) * 1000000)::bigint))
    || rota.audit_field(convert_to(actor, 'UTF8'))
    || rota.audit_field(convert_to(action, 'UTF8'))
    || rota.audit_field(convert_to(target, 'UTF8'))
    || rota.audit_field(convert_to(detail::text, 'UTF8'))
  )
$$;

CREATE OR REPLACE FUNCTION rota.audit_append(actors text[], actions text[], targets text[], details jsonb[])
RETURNS TABLE (seq bigint, hash bytea)
LANGUAGE plpgsql AS $$
DECLARE
  head rota.audit_head;
  entry record;
  moment timestamptz;
  link bytea;
BEGIN
  SELECT * INTO STRICT head FROM rota.audit_head FOR UPDATE;
  FOR entry IN
    SELECT * FROM unnest(actors, actions, targets, details) AS given (actor, action, target, detail)
  LOOP
    moment := clock_timestamp();
    link := rota.audit_hash(head.seq + 1, moment, entry.actor, entry.action, entry.target, entry.detail, head.hash);
    INSERT INTO rota.audit VALUES
      (head.seq + 1, moment, entry.actor, entry.action, entry.target, entry.detail, head.hash, link);
    head.seq := head.seq + 1;
    head.hash := link;
  END LOOP;
  UPDATE rota.audit_head SET seq = head.seq, hash = head.hash;
  RETURN QUERY SELECT head.seq, head.hash;
END $$;

COMMENT ON FUNCTION rota.audit_append IS
  'Append entries in the caller''s transaction; call it last, because other writers wait until that transaction ends.';

CREATE OR REPLACE FUNCTION rota.audit_refuse() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION USING ERRCODE = 'RT002', MESSAGE = format('%s.%s is append-only', TG_TABLE_SCHEMA, TG_TABLE_NAME);
END $$;

CREATE OR REPLACE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON rota.audit
  FOR EACH STATEMENT EXECUTE FUNCTION rota.audit_refuse();

CREATE OR REPLACE TRIGGER append_only BEFORE DELETE OR TRUNCATE ON rota.audit_head
  FOR EACH STATEMENT EXECUTE FUNCTION rota.audit_refuse();
