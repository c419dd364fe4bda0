-- Days of table $1 that are over before $2, the oldest first.
SELECT d.day FROM rota.days_of($1::text) AS d
WHERE ((d.day + 1)::timestamp AT TIME ZONE 'UTC') <= $2::timestamptz GROUP BY d.day ORDER BY d.day
