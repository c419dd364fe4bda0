-- What a policy looks at of the outputs of layers $1 besides the outputs themselves.
SELECT l.pk_layer, l.str_name AS layer, l.first_frame, l.frame_step, j.topic, j.labels, j.request,
       coalesce(s.str_name, j.pk_show::text) AS show
FROM rota.layer l JOIN rota.job j ON j.pk_job = l.pk_job LEFT JOIN rota.show s ON s.pk_show = j.pk_show
WHERE l.pk_layer = ANY ($1::uuid[])
