-- Forget what has ended of what was carried out of the ring.
SELECT rota.queue_slot_shed(7)
