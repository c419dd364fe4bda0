-- The counter mode upsert was removed: its stripes are merged.
UPDATE rota.queue_storage SET counter_mode = 'ledger' WHERE counter_mode = 'upsert';

WITH striped AS (
  DELETE FROM rota.queue_terminal_live_counts WHERE stripe <> 0 RETURNING *
)
INSERT INTO rota.queue_terminal_live_counts AS c
  (lane_id, ready_slot, stripe, waiting, running, completed, cancelled, failed, deferred, dead)
SELECT lane_id, ready_slot, 0, sum(waiting), sum(running), sum(completed), sum(cancelled), sum(failed), sum(deferred), sum(dead)
FROM striped GROUP BY lane_id, ready_slot
ON CONFLICT (lane_id, ready_slot, stripe) DO UPDATE SET
  waiting = c.waiting + excluded.waiting, running = c.running + excluded.running,
  completed = c.completed + excluded.completed, cancelled = c.cancelled + excluded.cancelled,
  failed = c.failed + excluded.failed, deferred = c.deferred + excluded.deferred, dead = c.dead + excluded.dead;
