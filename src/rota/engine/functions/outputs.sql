-- Whether everyone who may see the job may read its output; used by every reader of the end of a frame.
CREATE OR REPLACE FUNCTION rota.output_readable(output text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT output IS NULL OR output = 'redacted' $$;

-- Layers of an ended job, with `n` frames of one moved from succeeded to quarantined.
CREATE OR REPLACE FUNCTION rota.layers_moved(layers rota.layer[], which uuid, n integer) RETURNS rota.layer[]
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

-- Counts `numbers` frames of each layer as quarantined, or, if negative, as succeeded again. Returns ended jobs whose
-- state changed: SUCCEEDED and OUTPUT_QUARANTINED are exchanged, worse states stay. A job that ends concurrently holds
-- the lock of its layer: afterwards the layer is found with the job.
CREATE OR REPLACE FUNCTION rota.outputs_count(layers uuid[], of_jobs uuid[], numbers integer[], because text)
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
          history = rota.job_history_shown(d.history, d.state, d.ts_submitted, d.ts_finished)
                    || jsonb_build_array(jsonb_build_array(n.state, rota.now_ms(), because))
        FROM (SELECT CASE WHEN EXISTS (SELECT FROM rota.job_done j CROSS JOIN LATERAL unnest(j.layers) AS l
                                       WHERE j.pk_job = moved.job AND l.quarantined > 0)
                     THEN 'OUTPUT_QUARANTINED' ELSE 'SUCCEEDED' END AS state) AS n
        WHERE d.pk_job = moved.job AND d.state IN ('SUCCEEDED', 'OUTPUT_QUARANTINED') AND d.state <> n.state
        RETURNING d.pk_job, d.pk_show, d.topic, d.state, d.workflow_id
      ), news AS (
        -- A run that has not received the end of the job yet receives the new state.
        UPDATE rota.workflow_news w SET state = c.state, reason = because
        FROM changed c WHERE c.workflow_id IS NOT NULL AND w.pk_job = c.pk_job AND w.kind = 'job' RETURNING 1
      )
      SELECT c.* FROM changed c;
  END LOOP;
END $$;
