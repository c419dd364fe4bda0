-- End runs of our own ($3, a list of objects), under the member's lease $1 with fence $2; rows for those that were ours.
SELECT name, run, due_ms FROM rota.agents_end($1::text, $2::bigint, $3::text::jsonb)
