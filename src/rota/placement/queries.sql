-- name: booked
-- Worker and resources of the bookings in the token ranges from $1 to $2, pairwise: of single frames, and of series.
SELECT p.pk_host AS worker, coalesce(p.series_first, p.token) AS first, p.token AS last, p.series_first IS NOT NULL AS series,
       p.int_cores_reserved AS cores, p.int_gpus_reserved AS gpus, coalesce(c.memory_mb, 0) AS memory_mb
FROM (
  SELECT p.* FROM unnest($1::bigint[], $2::bigint[]) AS run (first, last)
  JOIN rota.proc p ON p.token BETWEEN run.first AND run.last AND (p.int_cores_reserved > 0 OR p.int_gpus_reserved > 0)
  UNION
  SELECT p.* FROM rota.proc p WHERE p.token = ANY (rota.proc_carriers($1::bigint[], $2::bigint[]))
) AS p
-- The layer of the carrier is gone if its job has ended before the others.
LEFT JOIN rota.layer l ON l.pk_layer = coalesce((
  SELECT f.pk_layer FROM rota.proc f
  WHERE f.token BETWEEN p.series_first AND p.token AND NOT f.b_ended ORDER BY f.token LIMIT 1), p.pk_layer)
LEFT JOIN rota.queue_class q ON q.queue = l.queue
LEFT JOIN rota.placement_class c USING (class_id)
ORDER BY p.token

-- name: routing_file_get
-- Digest of the last loaded content of pools.yaml.
SELECT digest FROM rota.routing_file

-- name: routing_file_set
-- Record that the content with digest $1 was loaded.
INSERT INTO rota.routing_file (digest) VALUES ($1)
ON CONFLICT (b_one) DO UPDATE SET digest = excluded.digest, ts_loaded = now()

-- name: routing_lock
-- Serialize changes; readers are not blocked.
LOCK TABLE rota.topic_pool IN SHARE ROW EXCLUSIVE MODE

-- name: routing_pool_set
-- Configure pool $1: provides $2, status $3, description $4, draining since $5 ms, for $6 s at most, placement $7.
INSERT INTO rota.pool_spec (pk_alloc, provides, status, description, ts_drain_started, drain_timeout_s, placement)
VALUES ($1::uuid, $2::text[], $3, $4, to_timestamp($5::bigint / 1000.0), $6, $7)
ON CONFLICT (pk_alloc) DO UPDATE SET (provides, status, description, ts_drain_started, drain_timeout_s, placement)
  = (excluded.provides, excluded.status, excluded.description, excluded.ts_drain_started, excluded.drain_timeout_s,
     excluded.placement)

-- name: routing_pools
-- All pools with their configuration.
SELECT a.pk_alloc AS id, a.str_name AS name, coalesce(s.provides, '{}') AS provides,
       coalesce(s.status, 'active') AS status, coalesce(s.description, '') AS description,
       (extract(epoch FROM s.ts_drain_started) * 1000)::bigint AS drain_started_ms,
       coalesce(s.drain_timeout_s, 300) AS drain_timeout_s, coalesce(s.placement, 'fit') AS placement
FROM rota.alloc a LEFT JOIN rota.pool_spec s USING (pk_alloc) ORDER BY a.str_name

-- name: routing_topic_clear
-- Unmap topic $1.
DELETE FROM rota.topic_pool WHERE topic = $1

-- name: routing_topic_map
-- Map topic $1 to the pools $2, in order.
INSERT INTO rota.topic_pool (topic, place, pk_alloc)
SELECT $1, pool.place - 1, pool.id FROM unnest($2::uuid[]) WITH ORDINALITY AS pool (id, place)

-- name: routing_topics
-- All topics with their pools in order.
SELECT t.topic, array_agg(a.str_name ORDER BY t.place) AS pools
FROM rota.topic_pool t JOIN rota.alloc a USING (pk_alloc) GROUP BY t.topic ORDER BY t.topic
