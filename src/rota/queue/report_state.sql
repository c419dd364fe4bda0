-- How counts are kept and how far they lag, the slot in use, and who does the upkeep under the lease $1.
SELECT s.counter_mode, s.counters_trusted, d.pending AS pending_deltas, r.generation,
       extract(epoch FROM clock_timestamp() - r.rotated_at)::float8 AS open_s,
       (SELECT l.holder FROM rota.lease l WHERE l.name = $1::text AND l.expires_at > clock_timestamp()) AS keeper,
       clock_timestamp() AS as_of
FROM (SELECT count(*) AS pending FROM rota.queue_terminal_count_deltas) AS d, rota.queue_storage AS s,
     (SELECT generation, rotated_at FROM rota.queue_ring_rotations ORDER BY generation DESC LIMIT 1) AS r
