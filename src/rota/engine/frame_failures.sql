-- How often each frame has failed before, and how often its worker was lost.
SELECT e.pk_layer, e.frame, count(*) FILTER (WHERE e.code <> 'worker_lost') AS failed,
       count(*) FILTER (WHERE e.code = 'worker_lost') AS lost
FROM unnest($1::uuid[], $2::integer[]) AS a (layer, frame)
JOIN rota.frame_end e ON e.pk_layer = a.layer AND e.frame = a.frame WHERE e.state = 'RETRIED' GROUP BY 1, 2
