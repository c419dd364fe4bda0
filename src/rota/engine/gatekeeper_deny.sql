-- Mark those of the jobs $1 that wait for a decision as ending in way $2 for reasons $3 by words $4, unless they are being ended.
-- A row for each of their layers, with how many frames it has. From here on nobody else ends them.
WITH given AS (
  SELECT * FROM unnest($1::uuid[], $3::text[], rota.policy_words($4::bytea[])) AS g (id, reason, word)
), held AS (
  SELECT j.pk_job FROM rota.job j
  WHERE j.pk_job = ANY ($1::uuid[]) AND j.state IN ('PENDING', 'APPROVAL_REQUIRED') AND j.ends_as IS NULL
  ORDER BY j.pk_job FOR UPDATE
), marked AS (
  UPDATE rota.job j
  SET ends_as = $2::text, reason = g.reason, word = coalesce(g.word, j.word), ts_updated = clock_timestamp()
  FROM held JOIN given g ON g.id = held.pk_job WHERE j.pk_job = held.pk_job RETURNING j.pk_job
)
SELECT l.pk_job, l.pk_layer, l.frames FROM marked JOIN rota.layer l ON l.pk_job = marked.pk_job ORDER BY l.pk_layer
