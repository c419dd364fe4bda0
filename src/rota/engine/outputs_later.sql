-- Give back scans $1, claimed under the numbers $2, to be claimed again after $3 seconds each.
UPDATE rota.scan s SET ts_due = clock_timestamp() + make_interval(secs => mine.pause_s), unsettled = 0
FROM unnest($1::bigint[], $2::integer[], $3::float8[]) AS mine (token, tries, pause_s)
WHERE s.token = mine.token AND s.tries = mine.tries
