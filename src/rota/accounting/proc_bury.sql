-- Tombstone those of the tokens $2 of show $1 that have no proc; the answer is those that are under a stone now.
SELECT token FROM rota.proc_bury($1::uuid, $2::bigint[]) AS buried (token)
