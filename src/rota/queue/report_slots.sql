-- The ring slot by slot, and slot 7 beside it: generation, size, and what waits or runs there, by counters or by rows.
SELECT n.slot AS number, CASE WHEN n.slot < 7 THEN g.generation - (g.generation - n.slot) % 7 END AS generation,
       n.slot = g.generation % 7 AS is_open,
       pg_total_relation_size(format('rota.ready_entries_%s', n.slot)::regclass)
         + pg_total_relation_size(format('rota.queue_claims_%s', n.slot)::regclass)
         + pg_total_relation_size(format('rota.queue_closures_%s', n.slot)::regclass) AS bytes,
       coalesce(c.waiting, 0) AS waiting, coalesce(c.running, 0) AS running,
       pg_relation_size(format('rota.ready_entries_%s', n.slot)::regclass)
         + pg_relation_size(format('rota.queue_claims_%s', n.slot)::regclass) > 0 AS holds
FROM (SELECT rota.queue_generation() AS generation) AS g CROSS JOIN generate_series(0, 7) AS n (slot)
LEFT JOIN (
  SELECT u.ready_slot, sum(u.waiting)::bigint AS waiting, sum(u.running)::bigint AS running
  FROM (
    SELECT d.ready_slot, d.waiting, d.running FROM rota.queue_terminal_count_deltas d WHERE rota.queue_counters_hold()
    UNION ALL
    SELECT l.ready_slot, l.waiting, l.running FROM rota.queue_terminal_live_counts l WHERE rota.queue_counters_hold()
    UNION ALL
    SELECT s.ready_slot, s.waiting, s.running
    FROM (SELECT WHERE NOT rota.queue_counters_hold()) AS distrusted, LATERAL rota.queue_scan() AS s
  ) AS u GROUP BY 1
) AS c ON c.ready_slot = n.slot
ORDER BY n.slot
