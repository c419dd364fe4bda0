-- The ring slot by slot: its generation, its size, and what was neither ended nor pruned.
SELECT slot, CASE WHEN slot < 7 THEN g.generation - (g.generation - slot) % 7 END AS generation,
       slot < 7 AND slot = g.generation % 7 AS is_open,
       pg_total_relation_size(format('rota.ready_entries_%s', slot)::regclass)
         + pg_total_relation_size(format('rota.queue_claims_%s', slot)::regclass)
         + pg_total_relation_size(format('rota.queue_closures_%s', slot)::regclass) AS bytes,
       rota.queue_slot_live(slot) AS live
FROM generate_series(0, 7) AS slot, (SELECT rota.queue_generation() AS generation) AS g
ORDER BY slot
