-- What the metrics tell: pending deltas, whether counters are trusted, and totals over all queues.
SELECT (SELECT count(*) FROM rota.queue_terminal_count_deltas) AS deltas,
       (SELECT counters_trusted FROM rota.queue_storage) AS trusted,
       coalesce(sum(c.waiting), 0)::bigint AS waiting, coalesce(sum(c.running), 0)::bigint AS running,
       coalesce(sum(c.deferred), 0)::bigint AS deferred, coalesce(sum(c.dead), 0)::bigint AS dead
FROM rota.queue_counts_fast() AS c
