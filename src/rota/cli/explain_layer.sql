-- Frames of layer $1 that wait for their time, or for room of their job's own, and whether their queue is paused.
SELECT coalesce(d.n, 0)::bigint AS deferred, d.run_at, q.paused,
       coalesce((SELECT sum(n) FROM rota.queue_returned WHERE parked_job = l.pk_job), 0)::bigint AS parked
FROM rota.layer l
JOIN rota.queues q ON q.queue = l.queue
LEFT JOIN (SELECT sum(n) AS n, min(run_at) AS run_at FROM rota.deferred_jobs WHERE layer_id = $1::uuid) AS d ON true
WHERE l.pk_layer = $1
