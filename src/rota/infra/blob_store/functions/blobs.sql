CREATE OR REPLACE FUNCTION rota.blob_make_day(day date) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
  name text := 'blob_' || to_char(day, 'YYYYMMDD');
  since timestamptz := day::timestamp AT TIME ZONE 'UTC';
BEGIN
  IF to_regclass('rota.' || name) IS NULL
     AND NOT EXISTS (SELECT FROM rota.blob_default b WHERE b.ts_put >= since AND b.ts_put < since + interval '1 day') THEN
    EXECUTE format('CREATE TABLE rota.%I PARTITION OF rota.blob FOR VALUES FROM (%L) TO (%L)', name, since,
                   since + interval '1 day');
  END IF;
END $$;

CREATE OR REPLACE FUNCTION rota.blob_drop_day(day date) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  EXECUTE format('DROP TABLE IF EXISTS rota.%I', 'blob_' || to_char(day, 'YYYYMMDD'));
END $$;
