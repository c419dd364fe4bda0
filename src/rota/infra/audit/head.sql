-- The end of the chain as its writers left it.
SELECT seq, hash FROM rota.audit_head
