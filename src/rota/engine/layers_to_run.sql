-- What frames of these layers run, as long as their jobs live.
SELECT l.pk_layer, l.frames, l.first_frame, l.frame_step, l.work, l.input, l.input_at, j.ends_as, j.word,
       EXISTS (SELECT FROM rota.job_resource r WHERE r.pk_job = l.pk_job)
       OR EXISTS (SELECT FROM rota.layer_resource r WHERE r.pk_layer = l.pk_layer) AS capped
FROM rota.layer l JOIN rota.job j ON j.pk_job = l.pk_job WHERE l.pk_layer = ANY ($1::uuid[])
