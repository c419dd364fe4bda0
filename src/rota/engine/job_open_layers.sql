-- Layers of job $1, while it is being ended: how many frames of each never came into the queue.
SELECT l.pk_layer, CASE WHEN j.state IN ('PENDING', 'APPROVAL_REQUIRED') THEN l.frames ELSE 0 END AS unqueued,
       j.ends_as, j.reason
FROM rota.job j JOIN rota.layer l ON l.pk_job = j.pk_job
WHERE j.pk_job = $1::uuid AND j.ends_as IS NOT NULL ORDER BY l.pk_layer
