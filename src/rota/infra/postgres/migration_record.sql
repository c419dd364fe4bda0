-- Note that a migration was applied, in the same transaction as the migration itself.
INSERT INTO rota.migration (number, phase, name, checksum) VALUES ($1, $2, $3, $4)
