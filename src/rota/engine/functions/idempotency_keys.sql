CREATE OR REPLACE FUNCTION rota.job_keys_known(shows uuid[], keys text[], jobs uuid[], digests bytea[])
RETURNS SETOF rota.job_unwritten
LANGUAGE sql VOLATILE AS $$
  SELECT given.at::integer, CASE WHEN k.digest = given.digest THEN 'already' ELSE 'conflict' END, k.pk_job,
         coalesce((SELECT j.state FROM rota.job j WHERE j.pk_job = k.pk_job),
                  (SELECT d.state FROM rota.job_done d WHERE d.pk_job = k.pk_job LIMIT 1))
  FROM unnest(shows, keys, jobs, digests) WITH ORDINALITY AS given (pk_show, key, pk_job, digest, at)
  JOIN rota.idempotency_key k ON k.pk_show = given.pk_show AND k.key = given.key
  WHERE k.pk_job <> given.pk_job
$$;

-- Takes idempotency keys, and reports those taken before: by the same submission ('already') or another one
-- ('conflict', and then none is taken). Waits for a key that a concurrent transaction is taking.
CREATE OR REPLACE FUNCTION rota.job_keys(shows uuid[], keys text[], jobs uuid[], digests bytea[])
RETURNS SETOF rota.job_unwritten
LANGUAGE plpgsql AS $$
BEGIN
  BEGIN
    INSERT INTO rota.idempotency_key (pk_show, key, pk_job, digest)
    SELECT given.pk_show, given.key, given.pk_job, given.digest
    FROM unnest(shows, keys, jobs, digests) WITH ORDINALITY AS given (pk_show, key, pk_job, digest, at)
    WHERE given.key IS NOT NULL ORDER BY given.pk_show, given.key COLLATE "C", given.at
    ON CONFLICT DO NOTHING;
    IF EXISTS (SELECT FROM rota.job_keys_known(shows, keys, jobs, digests) AS k WHERE k.outcome = 'conflict') THEN
      RAISE EXCEPTION USING ERRCODE = 'RT030';
    END IF;
  EXCEPTION WHEN SQLSTATE 'RT030' THEN
    NULL;
  END;
  RETURN QUERY SELECT * FROM rota.job_keys_known(shows, keys, jobs, digests);
END $$;
