-- Those of the keys that other jobs have. The lookup is a subquery of its own, for each key: a join that was planned while
-- the table was tiny would read all of it.
CREATE OR REPLACE FUNCTION rota.job_keys_known(shows uuid[], keys text[], jobs uuid[], digests bytea[])
RETURNS SETOF rota.job_unwritten
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
  RETURN QUERY
  SELECT given.at::integer, CASE WHEN k.digest = given.digest THEN 'already' ELSE 'conflict' END, k.pk_job,
         coalesce((SELECT j.state FROM rota.job j WHERE j.pk_job = k.pk_job),
                  (SELECT d.state FROM rota.job_done d WHERE d.pk_job = k.pk_job LIMIT 1))
  FROM unnest(shows, keys, jobs, digests) WITH ORDINALITY AS given (pk_show, key, pk_job, digest, at)
  CROSS JOIN LATERAL (
    SELECT k.pk_job, k.digest FROM rota.idempotency_key k WHERE k.pk_show = given.pk_show AND k.key = given.key OFFSET 0
  ) AS k
  WHERE k.pk_job <> given.pk_job;
END $$;

-- Takes idempotency keys, and reports those taken before: by the same submission ('already') or another one
-- ('conflict', and then none is taken). Waits for a key that a concurrent transaction is taking.
CREATE OR REPLACE FUNCTION rota.job_keys(shows uuid[], keys text[], jobs uuid[], digests bytea[])
RETURNS SETOF rota.job_unwritten
LANGUAGE plpgsql AS $$
DECLARE
  missing integer := cardinality(array_remove(keys, NULL));
  inserted integer;
  known rota.job_unwritten[];
BEGIN
  BEGIN
    LOOP
      INSERT INTO rota.idempotency_key (pk_show, key, pk_job, digest)
      SELECT given.pk_show, given.key, given.pk_job, given.digest
      FROM unnest(shows, keys, jobs, digests) WITH ORDINALITY AS given (pk_show, key, pk_job, digest, at)
      WHERE given.key IS NOT NULL ORDER BY given.pk_show, given.key COLLATE "C", given.at
      ON CONFLICT DO NOTHING;
      GET DIAGNOSTICS inserted = ROW_COUNT;
      missing := missing - inserted;
      known := ARRAY(SELECT k FROM rota.job_keys_known(shows, keys, jobs, digests) AS k);
      IF EXISTS (SELECT FROM unnest(known) AS k WHERE k.outcome = 'conflict') THEN
        RAISE EXCEPTION USING ERRCODE = 'RT030';
      END IF;
      -- A key that was neither inserted nor found expired and was deleted in between: it is taken again.
      EXIT WHEN missing <= cardinality(known) OR NOT EXISTS (
        SELECT FROM unnest(shows, keys) AS given (pk_show, key) WHERE given.key IS NOT NULL AND NOT EXISTS (
          SELECT FROM rota.idempotency_key k WHERE k.pk_show = given.pk_show AND k.key = given.key));
    END LOOP;
  EXCEPTION WHEN SQLSTATE 'RT030' THEN
    known := ARRAY(SELECT k FROM rota.job_keys_known(shows, keys, jobs, digests) AS k);
  END;
  RETURN QUERY SELECT * FROM unnest(known);
END $$;
