-- name: explain_failure
-- The first failed frame of layers $1, if any; attempts that were retried do not count.
SELECT e.pk_layer AS layer, e.frame, e.attempt, e.state, e.code, e.error, w.str_name AS worker,
       coalesce(e.ts_ended, e.ts_finished) AS at
FROM unnest($1::uuid[]) AS of (layer)
CROSS JOIN LATERAL (
  SELECT * FROM rota.frame_end f
  WHERE f.pk_layer = of.layer AND f.state NOT IN ('SUCCEEDED', 'RETRIED', 'RETURNED') ORDER BY f.ts_finished LIMIT 1
) AS e
LEFT JOIN rota.worker w ON w.pk_host = e.pk_host
ORDER BY e.ts_finished LIMIT 1

-- name: explain_letter
-- The first dead letter of job $1.
SELECT d.reason, d.error FROM rota.dlq_entries d WHERE d.job_id = $1::uuid ORDER BY d.dlq_id LIMIT 1

-- name: explain_before
-- Jobs that job $1 waits for in order of submission, at most $2, and their number; names only of its own show.
SELECT b.pk_job AS id, CASE WHEN b.pk_show = j.pk_show THEN b.str_name ELSE b.pk_job::text END AS name, b.state, b.reason,
       a.if_failed, count(*) OVER () AS jobs
FROM rota.job_after a JOIN rota.job b ON b.pk_job = a.pk_before JOIN rota.job j ON j.pk_job = a.pk_job
WHERE a.pk_job = $1::uuid ORDER BY b.ts_submitted, b.pk_job LIMIT $2::integer

-- name: explain_holders
-- The largest users of the limit with key $3 at level $2 in show $1, at most $4: jobs, or the layers of a capped job.
SELECT u.id, coalesce(l.str_name, j.str_name, u.id::text) AS name, u.frames, u.cores, u.gpus
FROM (
  SELECT CASE WHEN $2::text = 'job' THEN p.pk_layer ELSE p.pk_job END AS id,
         count(*) FILTER (WHERE NOT p.b_ended) AS frames,
         sum(p.int_cores_reserved)::bigint AS cores, sum(p.int_gpus_reserved)::bigint AS gpus
  FROM rota.proc p
  WHERE p.pk_show = $1::uuid AND $3::uuid = CASE $2 WHEN 'subscription' THEN p.pk_alloc WHEN 'folder' THEN p.pk_folder
                                                    WHEN 'job' THEN p.pk_job WHEN 'layer' THEN p.pk_layer
                                                    ELSE p.pk_dept END
  GROUP BY 1 ORDER BY 3 DESC, 4 DESC, 1 LIMIT $4::integer
) AS u
LEFT JOIN rota.layer l ON $2 = 'job' AND l.pk_layer = u.id
LEFT JOIN rota.job j ON j.pk_job = u.id
ORDER BY u.cores DESC, u.gpus DESC, u.id

-- name: explain_holders_jobs
-- Jobs of show $1 that count against its limit of concurrent jobs, at most $2, oldest first.
SELECT s.pk_job AS id, j.str_name AS name, 0 AS frames, 0 AS cores, 0 AS gpus
FROM rota.job_slot s JOIN rota.job j USING (pk_job) WHERE s.pk_show = $1::uuid ORDER BY s.ts_taken, s.pk_job LIMIT $2::integer

-- name: explain_holders_pools
-- The shows that use most of the pools $1, at most $2.
SELECT u.id, coalesce(s.str_name, u.id::text) AS name, u.frames, u.cores, u.gpus
FROM (
  SELECT p.pk_show AS id, count(*) FILTER (WHERE NOT p.b_ended) AS frames, sum(p.int_cores_reserved)::bigint AS cores,
         sum(p.int_gpus_reserved)::bigint AS gpus
  FROM rota.proc p WHERE p.pk_alloc = ANY ($1::uuid[]) GROUP BY 1 ORDER BY 3 DESC, 4 DESC, 1 LIMIT $2::integer
) AS u
LEFT JOIN rota.show s ON s.pk_show = u.id
ORDER BY u.cores DESC, u.gpus DESC, u.id

-- name: explain_job
-- State of job $1 that can block it besides its frames, and the leader by the lease $2.
SELECT j.pk_show, j.pk_folder, j.pk_dept, j.ends_as, j.ts_ask_at,
       CASE WHEN j.ts_dispatch_retry > clock_timestamp() THEN j.dispatch_failures ELSE 0 END AS dispatch_failures,
       j.dispatch_error, j.ts_dispatch_retry, m.jobs_max,
       CASE WHEN m.jobs_max IS NOT NULL AND j.state = 'SCHEDULED'
                 AND NOT EXISTS (SELECT FROM rota.job_slot t WHERE t.pk_job = j.pk_job)
            THEN rota.job_slots_used(j.pk_show) END AS jobs_before,
       coalesce((SELECT sum(n) FROM rota.queue_returned WHERE parked_job = j.pk_job), 0)::bigint AS parked,
       (SELECT l.holder FROM rota.lease l WHERE l.name = $2::text AND l.expires_at > clock_timestamp()) AS leader,
       clock_timestamp() AS now
FROM rota.job j JOIN rota.show s USING (pk_show) LEFT JOIN rota.policy_word w USING (word)
CROSS JOIN LATERAL (SELECT least(nullif(s.int_max_jobs, -1), w.jobs_max) AS jobs_max) AS m
WHERE j.pk_job = $1::uuid

-- name: explain_layers
-- Of layers $2 of job $1: deferred frames, and whether their queue is paused.
SELECT l.pk_layer, q.paused, coalesce(d.n, 0)::bigint AS deferred, d.run_at
FROM rota.layer l
JOIN rota.queues q ON q.queue = l.queue
LEFT JOIN (SELECT layer_id, sum(n) AS n, min(run_at) AS run_at FROM rota.deferred_jobs WHERE job_id = $1::uuid GROUP BY 1) AS d
  ON d.layer_id = l.pk_layer
WHERE l.pk_layer = ANY ($2::uuid[])

-- name: explain_position
-- Frames of queue $3 at priority $4 that are claimed before the first waiting frame of layer $2 of job $1.
-- Returned frames are first; then jobs take turns, the one first that has waited longest for its turn, and each has at
-- most a quantum. Bounded: of returned ranges and of the entries of a lane the first thousand are examined, of the
-- layer's own entries the first $5; what is further behind counts by its position. No row when none is found.
WITH lane AS MATERIALIZED (
  SELECT l.lane_id, k.cursor, CASE WHEN q.by_job THEN rota.queue_quantum() ELSE 2147483647 END AS quantum
  FROM rota.queues q JOIN rota.queue_lanes l USING (queue)
  CROSS JOIN LATERAL rota.queue_cursors(ARRAY[l.lane_id]) AS k
  WHERE q.queue = $3::text AND l.priority = $4::smallint
), back AS MATERIALIZED (
  SELECT r.lane_id, r.first_seq AS seq, e.layer_id = $2::uuid AS mine,
         CASE WHEN r.turn_of IS NULL THEN '-infinity' ELSE r.returned_at END AS since,
         CASE WHEN r.turn_of IS NULL THEN r.n ELSE least(r.n, l.quantum) END AS frames
  FROM (SELECT * FROM rota.queue_returned u
        WHERE u.parked_job IS NULL AND u.lane_id = ANY (ARRAY(SELECT lane_id FROM lane))
        ORDER BY u.lane_id, u.first_seq LIMIT 1000) AS r
  JOIN lane l USING (lane_id)
  LEFT JOIN LATERAL (
    SELECT x.layer_id FROM rota.ready_entries x
    WHERE x.ready_slot = r.ready_slot AND x.lane_id = r.lane_id AND x.lane_seq <= r.first_seq
    ORDER BY x.lane_seq DESC LIMIT 1) AS e ON true
), front AS MATERIALIZED (
  SELECT l.lane_id, e.seq, e.layer_id = $2 AS mine, e.enqueued_at AS since,
         least(l.quantum, e.next - e.seq - coalesce((
           SELECT sum(least(t.first_seq + t.n, e.next) - greatest(t.first_seq, e.seq)) FROM rota.ready_tombstones t
           WHERE t.lane_id = l.lane_id AND t.first_seq < e.next AND t.first_seq + t.n > e.seq), 0)) AS frames
  FROM lane l CROSS JOIN LATERAL (
    SELECT greatest(x.lane_seq, l.cursor) AS seq, x.lane_seq + x.n AS next, x.layer_id, x.enqueued_at
    FROM rota.ready_entries x
    WHERE x.lane_id = l.lane_id AND x.lane_seq + x.n > l.cursor AND x.lane_seq >= coalesce((
      SELECT max(b.lane_seq) FROM rota.ready_entries b WHERE b.lane_id = l.lane_id AND b.lane_seq <= l.cursor), 0)
    ORDER BY x.lane_seq LIMIT 1000) AS e
), first AS MATERIALIZED (
  SELECT b.lane_id, b.seq, b.since FROM back b WHERE b.mine
  UNION ALL SELECT f.lane_id, f.seq, f.since FROM front f WHERE f.mine AND f.frames > 0
  ORDER BY since, seq LIMIT 1
), own AS MATERIALIZED (
  SELECT e.lane_id, e.layer_id, e.lane_seq, e.n FROM rota.ready_entries e
  WHERE e.job_id = $1::uuid AND NOT EXISTS (SELECT FROM first) LIMIT $5::integer
)
SELECT (coalesce((SELECT sum(b.frames) FROM back b WHERE (b.since, b.seq) < (f.since, f.seq)), 0)
        + coalesce((SELECT sum(greatest(0, e.frames)) FROM front e
                    WHERE e.since < f.since OR (e.lane_id = f.lane_id AND e.seq < f.seq AND e.since <= f.since)), 0)
       )::bigint AS ahead
FROM first f
UNION ALL
SELECT (min(greatest(o.lane_seq, l.cursor) - l.cursor) + coalesce((SELECT sum(b.frames) FROM back b), 0))::bigint
FROM own o JOIN lane l USING (lane_id) WHERE o.layer_id = $2 AND o.lane_seq + o.n > l.cursor HAVING count(*) > 0

-- name: explain_rate
-- Jobs and frames of show $1 that ended within the last hour, at most $2 jobs, and the age of the first of them.
SELECT count(*) AS jobs, coalesce(sum(d.frames), 0)::bigint AS frames,
       coalesce(extract(epoch FROM clock_timestamp() - min(d.ts_finished)), 0)::float8 AS span_s
FROM (
  SELECT j.ts_finished,
         (SELECT sum(l.succeeded + l.quarantined + l.failed + l.timed_out) FROM unnest(j.layers) AS l) AS frames
  FROM rota.job_done j
  WHERE j.pk_show = $1::uuid AND j.ts_finished > clock_timestamp() - interval '1 hour'
  ORDER BY j.ts_finished DESC LIMIT $2::integer
) AS d

-- name: explain_running
-- Workers that run frames of job $1, earliest booking first; at most $2 rows.
SELECT p.pk_layer AS layer, coalesce(w.str_name, p.pk_host::text) AS worker, p.frames, p.since
FROM (SELECT pk_layer, pk_host, count(*) AS frames, min(ts_booked) AS since
      FROM rota.proc WHERE pk_job = $1::uuid AND NOT b_ended GROUP BY 1, 2 ORDER BY 4 LIMIT $2::integer) AS p
LEFT JOIN rota.worker w USING (pk_host) ORDER BY p.since
