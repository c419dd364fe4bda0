-- End scans $1 under the numbers $2 of their claims, and say which: those that nobody else has claimed or settled since.
DELETE FROM rota.scan s USING unnest($1::bigint[], $2::integer[]) AS mine (token, tries)
WHERE s.token = mine.token AND s.tries = mine.tries RETURNING s.token
