-- Append entries to the chain in the caller's transaction, and tell its new end.
SELECT seq, hash FROM rota.audit_append($1::text[], $2::text[], $3::text[], $4::jsonb[])
