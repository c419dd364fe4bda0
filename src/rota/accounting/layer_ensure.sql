-- Make the row of layer $2 of show $1, without caps, if its job lives or frames of it run, and it has none.
INSERT INTO rota.layer_resource (pk_layer, pk_job, pk_show)
SELECT l.pk_layer, l.pk_job, j.pk_show FROM rota.layer l JOIN rota.job j ON j.pk_job = l.pk_job
WHERE j.pk_show = $1::uuid AND l.pk_layer = $2::uuid
UNION
SELECT p.pk_layer, p.pk_job, p.pk_show FROM rota.proc p WHERE p.pk_show = $1::uuid AND p.pk_layer = $2::uuid
ON CONFLICT DO NOTHING
