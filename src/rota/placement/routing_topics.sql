-- Every topic with its pools in order.
SELECT t.topic, array_agg(a.str_name ORDER BY t.place) AS pools
FROM rota.topic_pool t JOIN rota.alloc a USING (pk_alloc) GROUP BY t.topic ORDER BY t.topic
