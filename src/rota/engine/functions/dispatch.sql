-- What the frames of layers execute, for jobs that are live. Planned once: for one job, planning would take five times as
-- long as execution. Rows are found by id, whatever the sizes of the tables were when it was planned.
CREATE OR REPLACE FUNCTION rota.layers_to_run(of_layers uuid[]) RETURNS TABLE (
  pk_layer uuid, frames integer, first_frame integer, frame_step integer, work bytea, input bytea, input_at text,
  int_layers smallint, ends_as text, word integer, capped boolean)
LANGUAGE plpgsql STABLE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
BEGIN
  RETURN QUERY
  SELECT l.pk_layer, l.frames, l.first_frame, l.frame_step, l.work, l.input, l.input_at, j.int_layers, j.ends_as, j.word,
         EXISTS (SELECT FROM rota.job_resource r WHERE r.pk_job = l.pk_job)
         OR EXISTS (SELECT FROM rota.layer_resource r WHERE r.pk_layer = l.pk_layer)
  FROM rota.layer l JOIN rota.job j ON j.pk_job = l.pk_job WHERE l.pk_layer = ANY (of_layers);
END $$;
