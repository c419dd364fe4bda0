-- Make the row of layer $2 of show $1, without caps, if frames of it run and it has none.
INSERT INTO rota.layer_resource (pk_layer, pk_job, pk_show)
SELECT pk_layer, pk_job, pk_show FROM rota.proc WHERE pk_show = $1::uuid AND pk_layer = $2::uuid LIMIT 1
ON CONFLICT DO NOTHING
