-- An admitted job that another limit has kept from its first booking for a while does not occupy a place.
CREATE OR REPLACE FUNCTION rota.job_slots_used(of_show uuid) RETURNS bigint
LANGUAGE sql VOLATILE AS $$
  SELECT count(*) FROM rota.job_slot s JOIN rota.job j ON j.pk_job = s.pk_job
  WHERE s.pk_show = of_show AND (
    j.state <> 'SCHEDULED' OR j.history @> '[["DISPATCHED"]]' OR s.ts_taken > clock_timestamp() - interval '30 s'
    OR EXISTS (SELECT FROM rota.proc p WHERE p.pk_job = s.pk_job))
$$;

-- Those of the jobs, in order, that may run: they run already, were admitted before, or fit the limit. The others
-- return why they wait. Calls for one show are serialized; a show without a limit admits all.
CREATE OR REPLACE FUNCTION rota.jobs_let_in(of_show uuid, jobs uuid[]) RETURNS uuid[]
LANGUAGE plpgsql AS $$
DECLARE
  of_all integer := (SELECT nullif(s.int_max_jobs, -1) FROM rota.show s WHERE s.pk_show = of_show);
  by_policy boolean := false;
  let_in uuid[];
  new uuid[] := '{}';
  used bigint;
  asked record;
BEGIN
  by_policy := EXISTS (SELECT FROM rota.job j JOIN rota.policy_word w ON w.word = j.word
                       WHERE j.pk_job = ANY (jobs) AND w.jobs_max IS NOT NULL);
  IF of_all IS NULL AND NOT by_policy
     AND NOT EXISTS (SELECT FROM rota.job_slot s WHERE s.pk_show = of_show) THEN
    RETURN jobs;
  END IF;
  let_in := ARRAY(SELECT s.pk_job FROM rota.job_slot s WHERE s.pk_job = ANY (jobs));
  IF let_in @> jobs THEN
    RETURN let_in;
  END IF;

  PERFORM rota.queue_read_committed();
  PERFORM pg_advisory_xact_lock(1936486260, rota.show_lock_number(of_show));
  DELETE FROM rota.job_slot s WHERE s.pk_show = of_show AND NOT EXISTS (SELECT FROM rota.job j WHERE j.pk_job = s.pk_job);
  INSERT INTO rota.job_slot (pk_job, pk_show)
  SELECT j.pk_job, of_show FROM rota.job j
  WHERE j.state IN ('DISPATCHED', 'RUNNING') AND (j.pk_job = ANY (jobs) OR (by_policy AND j.pk_show = of_show))
  ON CONFLICT DO NOTHING;
  used := rota.job_slots_used(of_show);
  FOR asked IN
    SELECT u.job, least(of_all, w.jobs_max) AS most
    FROM unnest(jobs) WITH ORDINALITY AS u (job, at)
    LEFT JOIN rota.job j ON j.pk_job = u.job LEFT JOIN rota.policy_word w ON w.word = j.word
    WHERE NOT EXISTS (SELECT FROM rota.job_slot s WHERE s.pk_job = u.job) ORDER BY u.at
  LOOP
    IF asked.most IS NULL OR used < asked.most THEN
      new := new || asked.job;
      used := used + 1;
    END IF;
  END LOOP;
  INSERT INTO rota.job_slot (pk_job, pk_show) SELECT job, of_show FROM unnest(new) AS job ON CONFLICT DO NOTHING;

  let_in := ARRAY(SELECT s.pk_job FROM rota.job_slot s WHERE s.pk_job = ANY (jobs));
  UPDATE rota.job j SET reason = waits.reason, ts_updated = clock_timestamp()
  FROM (SELECT w.pk_job, CASE WHEN w.pk_job <> ALL (let_in) THEN 'tenant_limit' END AS reason FROM rota.job w
        WHERE w.pk_job = ANY (jobs) AND (w.pk_job <> ALL (let_in)) <> (w.reason IS NOT DISTINCT FROM 'tenant_limit')
        ORDER BY w.pk_job FOR NO KEY UPDATE) AS waits
  WHERE j.pk_job = waits.pk_job;
  RETURN let_in;
END $$;

-- Jobs that run when a limit is set count against it.
CREATE OR REPLACE FUNCTION rota.show_jobs_limited() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
  IF NEW.int_max_jobs < 0 THEN
    DELETE FROM rota.job_slot s WHERE s.pk_show = NEW.pk_show;
  ELSIF OLD.int_max_jobs < 0 THEN
    INSERT INTO rota.job_slot (pk_job, pk_show)
    SELECT j.pk_job, NEW.pk_show FROM rota.job j
    WHERE j.pk_show = NEW.pk_show AND (j.state IN ('DISPATCHED', 'RUNNING')
                                       OR EXISTS (SELECT FROM rota.proc p WHERE p.pk_job = j.pk_job))
    ON CONFLICT DO NOTHING;
  END IF;
  PERFORM pg_notify('rota_limits', NEW.pk_show::text);
  RETURN NULL;
END $$;

CREATE OR REPLACE TRIGGER jobs_limited AFTER UPDATE OF int_max_jobs ON rota.show FOR EACH ROW
  WHEN (OLD.int_max_jobs IS DISTINCT FROM NEW.int_max_jobs) EXECUTE FUNCTION rota.show_jobs_limited();
