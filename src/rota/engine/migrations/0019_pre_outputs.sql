-- Outputs that must be looked into, and those that are kept back. See docs/adr/0020-policy.md.
-- Locks, in this order: rows of scan, of frame_end, of output, layers by id, job_done, the audit trail.

-- Null: as it was, for everybody who may see the job. The row that ends a frame says so from the first moment on.
ALTER TABLE rota.frame_end ADD COLUMN output text CHECK (output IN ('held', 'quarantined', 'redacted'));
ALTER TABLE rota.frame_end ADD COLUMN checks jsonb;

COMMENT ON COLUMN rota.frame_end.output IS 'held: nobody reads it before it was scanned; quarantined; redacted: it is not as the frame left it.';
COMMENT ON COLUMN rota.frame_end.checks IS 'Every look at it, in order: rota.model.output.Check.';

-- Whether everybody who may see the job may read it: what every reader of the end of a frame asks.
CREATE FUNCTION rota.output_readable(output text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT output IS NULL OR output = 'redacted' $$;

-- Whoever claims a row moves `ts_due` to the end of its lease and counts `tries`: a verdict counts under that number only.
CREATE TABLE rota.scan (
  token     bigint PRIMARY KEY,
  pk_layer  uuid NOT NULL,
  frame     integer NOT NULL,
  pk_job    uuid NOT NULL,
  pk_show   uuid NOT NULL,
  mode      text NOT NULL CHECK (mode IN ('pass', 'hold', 'fail_closed')),
  budget_s  real NOT NULL,
  meta      bytea NOT NULL,
  tries     integer NOT NULL DEFAULT 0,
  unsettled integer NOT NULL DEFAULT 0,
  ts_ended  timestamptz NOT NULL DEFAULT now(),
  ts_due    timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02);

CREATE INDEX ON rota.scan (ts_due);
CREATE INDEX ON rota.scan (pk_job);

COMMENT ON COLUMN rota.scan.meta IS 'rota.model.output.OutputMeta, msgpack.';
COMMENT ON COLUMN rota.scan.unsettled IS 'Claims in a row of which nothing was heard: whoever looks at it may die of it.';
COMMENT ON COLUMN rota.scan.ts_ended IS 'When its frame ended: the end of a frame lies in this day or a later one.';

-- Outputs that were kept back or redacted, for those who decide about them.
CREATE TABLE rota.output (
  token      bigint PRIMARY KEY,
  pk_layer   uuid NOT NULL,
  frame      integer NOT NULL,
  pk_job     uuid NOT NULL,
  pk_show    uuid NOT NULL,
  state      text NOT NULL CHECK (state IN ('quarantined', 'redacted', 'released')),
  severity   text NOT NULL,
  rule       text NOT NULL DEFAULT '',
  reason     text NOT NULL DEFAULT '',
  meta       bytea NOT NULL,
  original   text[],
  ts_ended   timestamptz NOT NULL,
  ts_decided timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE INDEX ON rota.output (pk_show, token);
CREATE INDEX ON rota.output (pk_job);
CREATE INDEX ON rota.output (ts_decided);

COMMENT ON COLUMN rota.output.original IS 'Of a redacted one: pointers to what the frame left, as words; the value is called value, a file artifact:NAME.';

-- Layers of a job that has ended, with `n` frames of one moved from succeeded to quarantined.
CREATE FUNCTION rota.layers_moved(layers rota.layer[], which uuid, n integer) RETURNS rota.layer[]
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
  FOR i IN 1 .. cardinality(layers) LOOP
    IF layers[i].pk_layer = which THEN
      layers[i].succeeded := layers[i].succeeded - n;
      layers[i].quarantined := layers[i].quarantined + n;
    END IF;
  END LOOP;
  RETURN layers;
END $$;

-- Count `numbers` frames of each layer as quarantined, or, where that is less than 0, as succeeded again. Returns the jobs
-- that had ended and are in another state now: SUCCEEDED and OUTPUT_QUARANTINED become each other, worse ends stay.
-- A job that ends meanwhile holds the lock of its layer: after it the layer is found with the job.
CREATE FUNCTION rota.outputs_count(layers uuid[], of_jobs uuid[], numbers integer[], because text)
RETURNS SETOF rota.job_ended
LANGUAGE plpgsql AS $$
DECLARE
  moved record;
BEGIN
  FOR moved IN
    SELECT u.layer, u.job, sum(u.n)::integer AS n FROM unnest(layers, of_jobs, numbers) AS u (layer, job, n)
    GROUP BY 1, 2 HAVING sum(u.n) <> 0 ORDER BY 1
  LOOP
    UPDATE rota.layer l SET succeeded = l.succeeded - moved.n, quarantined = l.quarantined + moved.n
    WHERE l.pk_layer = moved.layer;
    CONTINUE WHEN FOUND;
    UPDATE rota.job_done d SET layers = rota.layers_moved(d.layers, moved.layer, moved.n) WHERE d.pk_job = moved.job;
    RETURN QUERY
      WITH changed AS (
        UPDATE rota.job_done d SET
          state = n.state, reason = because,
          history = d.history || jsonb_build_array(jsonb_build_array(n.state, rota.now_ms(), because))
        FROM (SELECT CASE WHEN EXISTS (SELECT FROM rota.job_done j CROSS JOIN LATERAL unnest(j.layers) AS l
                                       WHERE j.pk_job = moved.job AND l.quarantined > 0)
                     THEN 'OUTPUT_QUARANTINED' ELSE 'SUCCEEDED' END AS state) AS n
        WHERE d.pk_job = moved.job AND d.state IN ('SUCCEEDED', 'OUTPUT_QUARANTINED') AND d.state <> n.state
        RETURNING d.pk_job, d.pk_show, d.topic, d.state, d.workflow_id
      ), news AS (
        -- A run that has not heard of its end hears of this one.
        UPDATE rota.workflow_news w SET state = c.state, reason = because
        FROM changed c WHERE c.workflow_id IS NOT NULL AND w.pk_job = c.pk_job AND w.kind = 'job' RETURNING 1
      )
      SELECT c.* FROM changed c;
  END LOOP;
END $$;
