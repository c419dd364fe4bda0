-- End job $1 in way $2 for reason $3, unless it is being ended already; no row when there is no such live job.
UPDATE rota.job SET
  ends_as = coalesce(ends_as, $2::text), reason = CASE WHEN ends_as IS NULL THEN $3::text ELSE reason END, ts_updated = now()
WHERE pk_job = $1::uuid
RETURNING ends_as, state
