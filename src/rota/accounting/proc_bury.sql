-- Bury those of the tokens $2 of show $1 that have no proc; the answer is those that lie in a grave now.
SELECT token FROM rota.proc_bury($1::uuid, $2::bigint[]) AS buried (token)
