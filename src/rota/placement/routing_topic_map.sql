-- Map topic $1 to the pools $2, in order.
INSERT INTO rota.topic_pool (topic, place, pk_alloc)
SELECT $1, pool.place - 1, pool.id FROM unnest($2::uuid[]) WITH ORDINALITY AS pool (id, place)
