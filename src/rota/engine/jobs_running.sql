-- How many frames of each layer of job $1 are booked now.
SELECT pk_layer, count(*) AS frames FROM rota.proc WHERE pk_job = $1::uuid GROUP BY pk_layer
