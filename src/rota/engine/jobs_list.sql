-- The newest jobs before id $3, live and done, of one show $1 and in one state $2 if given.
SELECT j.pk_job AS id, coalesce(s.str_name, j.pk_show::text) AS show, j.str_name AS name, j.topic, j.priority, j.state,
       j.reason, j.ts_submitted AS submitted_at, j.ts_finished AS finished_at,
       coalesce(sum(l.frames), 0)::bigint AS frames, coalesce(sum(l.succeeded), 0)::bigint AS succeeded,
       coalesce(sum(l.succeeded + l.quarantined + l.failed + l.timed_out + l.cancelled + l.denied), 0)::bigint AS ended
FROM (
  SELECT * FROM (
    (SELECT pk_job, pk_show, str_name, topic, priority, state, reason, ts_submitted, NULL::timestamptz AS ts_finished,
            NULL::rota.layer[] AS layers
     FROM rota.job
     WHERE ($1::uuid IS NULL OR pk_show = $1) AND ($2::text IS NULL OR state = $2) AND ($3::uuid IS NULL OR pk_job < $3)
     ORDER BY pk_job DESC LIMIT $4::int)
    UNION ALL
    (SELECT pk_job, pk_show, str_name, topic, priority, state, reason, ts_submitted, ts_finished, layers
     FROM rota.job_done
     WHERE ($1::uuid IS NULL OR pk_show = $1) AND ($2::text IS NULL OR state = $2) AND ($3::uuid IS NULL OR pk_job < $3)
     ORDER BY pk_job DESC LIMIT $4::int)
  ) AS found ORDER BY pk_job DESC LIMIT $4::int
) AS j
LEFT JOIN rota.show s USING (pk_show)
LEFT JOIN LATERAL (
  SELECT frames, succeeded, quarantined, failed, timed_out, cancelled, denied
  FROM rota.layer WHERE pk_job = j.pk_job AND j.layers IS NULL
  UNION ALL
  SELECT frames, succeeded, quarantined, failed, timed_out, cancelled, denied FROM unnest(j.layers)
) AS l ON true
GROUP BY j.pk_job, s.str_name, j.pk_show, j.str_name, j.topic, j.priority, j.state, j.reason, j.ts_submitted,
         j.ts_finished
ORDER BY j.pk_job DESC
