-- The last approval of each of the subjects $2 of kind $1.
SELECT DISTINCT ON (subject) pk_approval FROM rota.approval WHERE kind = $1::text AND subject = ANY ($2::text[])
ORDER BY subject, ts_requested DESC
