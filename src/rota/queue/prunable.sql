-- Sealed slots that hold anything and may be done.
SELECT slot FROM rota.queue_prunable() AS slot
