-- name: demo_ends
-- Attempts of frames of the jobs $1 that have ended: those that succeeded, of how many frames, and those made again.
SELECT count(*) FILTER (WHERE e.state = 'SUCCEEDED') AS ends,
       count(DISTINCT (e.pk_layer, e.frame)) FILTER (WHERE e.state = 'SUCCEEDED') AS frames,
       count(*) FILTER (WHERE e.state = 'RETRIED') AS retried,
       count(*) FILTER (WHERE e.state = 'RETRIED' AND e.code = 'worker_lost') AS lost
FROM rota.frame_end e
WHERE e.pk_layer IN (SELECT l.pk_layer FROM rota.job_done d, unnest(d.layers) l WHERE d.pk_job = ANY ($1::uuid[]))

-- name: demo_lost
-- Frames that wait again, or ran elsewhere, because worker $1 was lost.
SELECT count(*) FROM rota.frame_end WHERE pk_host = $1::uuid AND code = 'worker_lost'
