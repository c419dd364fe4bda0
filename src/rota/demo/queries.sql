-- name: demo_ends
-- Ended attempts of the jobs $1: succeeded, distinct succeeded frames, retried, and retried because of a lost worker.
SELECT count(*) FILTER (WHERE e.state = 'SUCCEEDED') AS ends,
       count(DISTINCT (e.pk_layer, e.frame)) FILTER (WHERE e.state = 'SUCCEEDED') AS frames,
       count(*) FILTER (WHERE e.state = 'RETRIED') AS retried,
       count(*) FILTER (WHERE e.state = 'RETRIED' AND e.code = 'worker_lost') AS lost
FROM rota.frame_end e
WHERE e.pk_layer IN (SELECT l.pk_layer FROM rota.job_done d, unnest(d.layers) l WHERE d.pk_job = ANY ($1::uuid[]))

-- name: demo_lost
-- Attempts that were lost with worker $1.
SELECT count(*) FROM rota.frame_end WHERE pk_host = $1::uuid AND code = 'worker_lost'
