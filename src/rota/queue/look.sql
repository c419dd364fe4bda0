-- Which frames and attempts claimed turns are.
SELECT token, job_id, layer_id, frame, attempt FROM rota.queue_look($1::bigint[], $2::varbit[])
