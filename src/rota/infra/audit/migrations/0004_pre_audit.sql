-- Who did what: append-only and chained by hashes, so that a change leaves a trace. Written by rota.audit_append alone.

CREATE TABLE rota.audit (
  seq       bigint PRIMARY KEY,
  at        timestamptz NOT NULL,
  actor     text NOT NULL,
  action    text NOT NULL,
  target    text NOT NULL,
  detail    jsonb NOT NULL,
  prev_hash bytea NOT NULL,
  hash      bytea NOT NULL
);

COMMENT ON COLUMN rota.audit.seq IS 'From 1 without a gap, in the order of commits.';
COMMENT ON COLUMN rota.audit.hash IS 'SHA-256 of this row and prev_hash; `rota audit verify` computes it again.';

-- The end of the chain. Its row lock puts writers in a row and is held until their transaction ends.
CREATE TABLE rota.audit_head (
  one  boolean PRIMARY KEY DEFAULT true CHECK (one),
  seq  bigint NOT NULL,
  hash bytea NOT NULL
) WITH (fillfactor = 50);

INSERT INTO rota.audit_head (seq, hash) VALUES (0, decode(repeat('00', 32), 'hex'));

-- Each field is preceded by its length in bytes, so that no two different rows read the same when joined.
CREATE FUNCTION rota.audit_field(field bytea) RETURNS bytea
LANGUAGE sql IMMUTABLE AS $$ SELECT int8send(octet_length(field)) || field $$;

CREATE FUNCTION rota.audit_hash(
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

CREATE FUNCTION rota.audit_append(actors text[], actions text[], targets text[], details jsonb[])
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

CREATE FUNCTION rota.audit_refuse() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION USING ERRCODE = 'RT002', MESSAGE = format('%s.%s is append-only', TG_TABLE_SCHEMA, TG_TABLE_NAME);
END $$;

CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON rota.audit
  FOR EACH STATEMENT EXECUTE FUNCTION rota.audit_refuse();

CREATE TRIGGER append_only BEFORE DELETE OR TRUNCATE ON rota.audit_head
  FOR EACH STATEMENT EXECUTE FUNCTION rota.audit_refuse();
