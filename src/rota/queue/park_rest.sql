-- Park what the job $2 has next in each of these lanes.
SELECT coalesce(sum(rota.queue_park_rest(lane, $2::uuid)), 0)::bigint
FROM (SELECT DISTINCT unnest($1::int[]) AS lane ORDER BY 1) AS sorted
