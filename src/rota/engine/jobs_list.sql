-- Of the $8 newest jobs before id $7, the first $9 that agree with the filters.
-- A last row without an id says in `before` how far back was looked; null when nothing is left.
-- Filters, null for any: shows $1, state $2, topic $3, reason $4, label $5 of the value $6.
WITH looked AS MATERIALIZED (
  SELECT * FROM rota.jobs_before($1::uuid[], $7::uuid, $8::int)
), agreeing AS MATERIALIZED (
  SELECT * FROM looked
  WHERE ($2::text IS NULL OR state = $2) AND ($3::text IS NULL OR topic = $3) AND ($4::text IS NULL OR reason = $4)
    AND ($5::text IS NULL OR labels ->> $5 = $6::text)
  ORDER BY pk_job DESC LIMIT $9::int
)
SELECT j.pk_job AS id, coalesce(s.str_name, j.pk_show::text) AS show, j.str_name AS name, j.topic, j.priority, j.state,
       j.reason, j.labels::text AS labels, j.ts_submitted AS submitted_at, j.ts_finished AS finished_at,
       l.frames, l.succeeded, l.ended, NULL::uuid AS before
FROM agreeing j
LEFT JOIN rota.show s USING (pk_show)
CROSS JOIN LATERAL (
  SELECT coalesce(sum(frames), 0)::bigint AS frames, coalesce(sum(succeeded), 0)::bigint AS succeeded,
         coalesce(sum(succeeded + quarantined + failed + timed_out + cancelled + denied), 0)::bigint AS ended
  FROM (
    SELECT frames, succeeded, quarantined, failed, timed_out, cancelled, denied
    FROM rota.layer WHERE pk_job = j.pk_job AND j.layers IS NULL
    UNION ALL
    SELECT frames, succeeded, quarantined, failed, timed_out, cancelled, denied FROM unnest(j.layers)
  ) AS each
) AS l
UNION ALL
SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
       CASE WHEN (SELECT count(*) FROM looked) = $8 THEN (SELECT pk_job FROM looked ORDER BY pk_job LIMIT 1) END
ORDER BY 1 DESC NULLS LAST
