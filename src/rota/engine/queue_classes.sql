-- What these queues stand for (null: all of them).
SELECT q.queue, q.pk_show, q.pk_folder, q.pk_dept, c.class_id, c.topic, c.requires, c.labels, c.preferred_pool,
       c.preferred_worker, c.cores, c.gpus, c.memory_mb
FROM rota.queue_class q JOIN rota.placement_class c ON c.class_id = q.class_id
WHERE $1::text[] IS NULL OR q.queue = ANY ($1)
