-- How many artifacts frames of layers $1 have left, and how many bytes they have.
SELECT count(*) AS files, coalesce(sum(split_part(split_part(word, ' ', 1), ':', 3)::bigint), 0)::bigint AS bytes
FROM rota.frame_end, unnest(artifacts) AS word
WHERE pk_layer = ANY ($1::uuid[]) AND state = 'SUCCEEDED' AND word ~ '^(pg|file):[0-9a-f]{64}:[0-9]{1,13} '
