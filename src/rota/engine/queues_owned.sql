-- Whose frames wait in which queue, and of which topic.
SELECT q.queue, q.pk_show, s.str_name AS show, c.topic
FROM rota.queue_class q JOIN rota.show s USING (pk_show) JOIN rota.placement_class c USING (class_id)
