-- Write into the five tables what the procs of the managed show $1 hold; a row per level with how many keys changed.
SELECT level, changed FROM rota.ledger_mirror($1::uuid)
