-- Every migration that was applied, by number.
SELECT number, phase, name, checksum, applied_at FROM rota.migration ORDER BY number
