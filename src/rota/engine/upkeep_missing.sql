-- Days for which table $1 needs a partition and has none: from $2 on $3 days ahead, and those the default has rows of.
SELECT wanted.day FROM (
  SELECT ($2::timestamptz AT TIME ZONE 'UTC')::date + ahead AS day FROM generate_series(0, $3::integer) AS ahead
  UNION SELECT * FROM rota.days_astray($1::text, 100)
) AS wanted
WHERE (wanted.day + 1)::timestamp AT TIME ZONE 'UTC' > ALL (
  SELECT d.until FROM rota.days_of($1::text) AS d WHERE d.day = wanted.day)
ORDER BY wanted.day
