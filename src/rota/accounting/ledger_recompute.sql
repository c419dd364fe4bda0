-- Write the five tables of the unmanaged show $1 anew from its procs; a row per level with how many keys were wrong.
SELECT level, changed FROM rota.ledger_recompute($1::uuid)
