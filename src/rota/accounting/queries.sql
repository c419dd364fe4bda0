-- name: dept_create
-- Create department $1 named $2.
INSERT INTO rota.dept (pk_dept, str_name) VALUES ($1::uuid, $2)

-- name: dept_delete
-- Delete department $1.
DELETE FROM rota.dept WHERE pk_dept = $1::uuid

-- name: dept_list
-- All departments.
SELECT pk_dept AS id, str_name AS name, int_version AS version FROM rota.dept ORDER BY str_name

-- name: dept_rename
-- Rename department $1 to $2.
UPDATE rota.dept SET str_name = $2 WHERE pk_dept = $1::uuid

-- name: dept_users
-- Shows with a point of department $1.
SELECT s.str_name AS name FROM rota.point p JOIN rota.show s USING (pk_show) WHERE p.pk_dept = $1::uuid ORDER BY 1

-- name: folder_change
-- Change limits of folder $2 of show $1; null keeps the current value.
UPDATE rota.folder_resource
SET int_min_cores = coalesce($3::bigint, int_min_cores), int_max_cores = coalesce($4::bigint, int_max_cores),
    int_min_gpus = coalesce($5::bigint, int_min_gpus), int_max_gpus = coalesce($6::bigint, int_max_gpus)
WHERE pk_show = $1::uuid AND pk_folder = $2::uuid

-- name: folder_create
-- Create folder $2 of show $1 named $3, without limits.
WITH made AS (INSERT INTO rota.folder (pk_folder, pk_show, str_name) VALUES ($2::uuid, $1::uuid, $3))
INSERT INTO rota.folder_resource (pk_folder, pk_show) VALUES ($2::uuid, $1::uuid)

-- name: folder_delete
-- Delete folder $2 of show $1.
DELETE FROM rota.folder WHERE pk_show = $1::uuid AND pk_folder = $2::uuid

-- name: folder_list
-- Folders of show $1, with limits and counters.
SELECT f.pk_folder AS id, f.str_name AS name, r.int_version AS version, r.int_cores AS cores, r.int_gpus AS gpus,
       jsonb_build_object('int_min_cores', r.int_min_cores, 'int_max_cores', r.int_max_cores,
                          'int_min_gpus', r.int_min_gpus, 'int_max_gpus', r.int_max_gpus) AS limits
FROM rota.folder f JOIN rota.folder_resource r USING (pk_folder)
WHERE f.pk_show = $1::uuid ORDER BY f.str_name

-- name: folder_rename
-- Rename folder $1 to $2.
UPDATE rota.folder SET str_name = $2 WHERE pk_folder = $1::uuid

-- name: job_change
-- Change limits of job $2 of show $1; null keeps the current value.
UPDATE rota.job_resource
SET int_max_cores = coalesce($3::bigint, int_max_cores), int_max_gpus = coalesce($4::bigint, int_max_gpus)
WHERE pk_show = $1::uuid AND pk_job = $2::uuid

-- name: job_ensure
-- Create the row of job $2 of show $1, without caps, if it is missing and the job exists or has running frames.
INSERT INTO rota.job_resource (pk_job, pk_show)
SELECT $2::uuid, $1::uuid
WHERE EXISTS (SELECT FROM rota.job WHERE pk_show = $1::uuid AND pk_job = $2::uuid)
   OR EXISTS (SELECT FROM rota.proc WHERE pk_show = $1::uuid AND pk_job = $2::uuid)
ON CONFLICT DO NOTHING

-- name: job_get
-- Limits and counters of job $2 of show $1.
SELECT pk_job AS id, pk_job::text AS name, int_version AS version, int_cores AS cores, int_gpus AS gpus,
       jsonb_build_object('int_max_cores', int_max_cores, 'int_max_gpus', int_max_gpus) AS limits
FROM rota.job_resource WHERE pk_show = $1::uuid AND pk_job = $2::uuid

-- name: layer_change
-- Change limits of layer $2 of show $1; null keeps the current value.
UPDATE rota.layer_resource
SET int_max_cores = coalesce($3::bigint, int_max_cores), int_max_gpus = coalesce($4::bigint, int_max_gpus)
WHERE pk_show = $1::uuid AND pk_layer = $2::uuid

-- name: layer_ensure
-- Create the row of layer $2 of show $1, without caps, if it is missing and its job exists or it has running frames.
INSERT INTO rota.layer_resource (pk_layer, pk_job, pk_show)
SELECT l.pk_layer, l.pk_job, j.pk_show FROM rota.layer l JOIN rota.job j ON j.pk_job = l.pk_job
WHERE j.pk_show = $1::uuid AND l.pk_layer = $2::uuid
UNION
SELECT p.pk_layer, p.pk_job, p.pk_show FROM rota.proc p WHERE p.pk_show = $1::uuid AND p.pk_layer = $2::uuid
ON CONFLICT DO NOTHING

-- name: layer_get
-- Limits and counters of layer $2 of show $1.
SELECT pk_layer AS id, pk_layer::text AS name, int_version AS version, int_cores AS cores, int_gpus AS gpus,
       jsonb_build_object('int_max_cores', int_max_cores, 'int_max_gpus', int_max_gpus) AS limits
FROM rota.layer_resource WHERE pk_show = $1::uuid AND pk_layer = $2::uuid

-- name: limit_version
-- A version above all earlier versions of limits.
SELECT nextval('rota.limit_version')

-- name: point_change
-- Change limits of department $2 in show $1; null keeps the current value.
UPDATE rota.point
SET int_min_cores = coalesce($3::bigint, int_min_cores), int_max_cores = coalesce($4::bigint, int_max_cores),
    int_min_gpus = coalesce($5::bigint, int_min_gpus), int_max_gpus = coalesce($6::bigint, int_max_gpus)
WHERE pk_show = $1::uuid AND pk_dept = $2::uuid

-- name: point_create
-- Create a point of department $2 in show $1, without limits.
INSERT INTO rota.point (pk_show, pk_dept) VALUES ($1::uuid, $2::uuid)

-- name: point_delete
-- Delete the point of department $2 in show $1.
DELETE FROM rota.point WHERE pk_show = $1::uuid AND pk_dept = $2::uuid

-- name: point_list
-- Points of show $1 by department, with limits and counters.
SELECT p.pk_dept AS id, d.str_name AS name, p.int_version AS version, p.int_cores AS cores, p.int_gpus AS gpus,
       jsonb_build_object('int_min_cores', p.int_min_cores, 'int_max_cores', p.int_max_cores,
                          'int_min_gpus', p.int_min_gpus, 'int_max_gpus', p.int_max_gpus) AS limits
FROM rota.point p JOIN rota.dept d USING (pk_dept)
WHERE p.pk_show = $1::uuid ORDER BY d.str_name

-- name: pool_create
-- Create pool $1 named $2.
INSERT INTO rota.alloc (pk_alloc, str_name) VALUES ($1::uuid, $2)

-- name: pool_delete
-- Delete pool $1.
DELETE FROM rota.alloc WHERE pk_alloc = $1::uuid

-- name: pool_list
-- All pools.
SELECT pk_alloc AS id, str_name AS name, int_version AS version FROM rota.alloc ORDER BY str_name

-- name: pool_rename
-- Rename pool $1 to $2.
UPDATE rota.alloc SET str_name = $2 WHERE pk_alloc = $1::uuid

-- name: pool_users
-- Shows with a subscription to pool $1.
SELECT s.str_name AS name FROM rota.subscription b JOIN rota.show s USING (pk_show)
WHERE b.pk_alloc = $1::uuid ORDER BY 1

-- name: proc_count
-- Number of procs of show $1, in total or charged to pool $2, folder $3 or department $4.
SELECT count(*) FROM rota.proc
WHERE pk_show = $1::uuid AND pk_alloc = coalesce($2::uuid, pk_alloc) AND pk_folder = coalesce($3::uuid, pk_folder)
  AND pk_dept = coalesce($4::uuid, pk_dept)

-- name: show_change
-- Limit show $1 to $2 concurrently running jobs; -1 means no limit.
UPDATE rota.show SET int_max_jobs = $2::integer WHERE pk_show = $1::uuid

-- name: show_create
-- Create show $1 named $2, managed or not ($3).
INSERT INTO rota.show (pk_show, str_name, b_scheduler_managed) VALUES ($1::uuid, $2, $3)

-- name: show_delete
-- Delete show $1 with its subscriptions, folders and points.
DELETE FROM rota.show WHERE pk_show = $1::uuid

-- name: show_get
-- Show $1.
SELECT pk_show AS id, str_name AS name, b_scheduler_managed AS managed, int_fence AS fence, int_version AS version,
       int_max_jobs AS max_jobs
FROM rota.show WHERE pk_show = $1::uuid

-- name: show_list
-- All shows.
SELECT pk_show AS id, str_name AS name, b_scheduler_managed AS managed, int_fence AS fence, int_version AS version,
       int_max_jobs AS max_jobs
FROM rota.show ORDER BY str_name

-- name: show_lock
-- Hold the lock of show $1 exclusive until the transaction ends; no row if the show was deleted.
SELECT pk_show AS id, str_name AS name, b_scheduler_managed AS managed, int_fence AS fence, int_version AS version,
       int_max_jobs AS max_jobs
FROM rota.show_exclusive($1::uuid) WHERE pk_show IS NOT NULL

-- name: show_raise_fence
-- Invalidate bookings of show $1 made in Redis before now; returns the new fence.
SELECT rota.show_raise_fence($1::uuid)

-- name: show_rename
-- Rename show $1 to $2.
UPDATE rota.show SET str_name = $2 WHERE pk_show = $1::uuid

-- name: show_set_managed
-- Move the accounting of show $1 to Redis ($2 true) or to PostgreSQL alone, with a new fence.
SELECT was, fence, version FROM rota.show_set_managed($1::uuid, $2::boolean)

-- name: subscription_change
-- Change the subscription of show $1 to pool $2; null keeps the current value.
UPDATE rota.subscription
SET int_size = coalesce($3::bigint, int_size), int_burst = coalesce($4::bigint, int_burst),
    int_gpu_burst = coalesce($5::bigint, int_gpu_burst)
WHERE pk_show = $1::uuid AND pk_alloc = $2::uuid

-- name: subscription_create
-- Create a subscription of show $1 to pool $2, of size 0; $3 is its id.
INSERT INTO rota.subscription (pk_subscription, pk_show, pk_alloc) VALUES ($3::uuid, $1::uuid, $2::uuid)

-- name: subscription_delete
-- Delete the subscription of show $1 to pool $2.
DELETE FROM rota.subscription WHERE pk_show = $1::uuid AND pk_alloc = $2::uuid

-- name: subscription_list
-- Subscriptions of show $1 by pool, with limits and counters.
SELECT b.pk_alloc AS id, a.str_name AS name, b.int_version AS version, b.int_cores AS cores, b.int_gpus AS gpus,
       jsonb_build_object('int_size', b.int_size, 'int_burst', b.int_burst, 'int_gpu_burst', b.int_gpu_burst) AS limits
FROM rota.subscription b JOIN rota.alloc a USING (pk_alloc)
WHERE b.pk_show = $1::uuid ORDER BY a.str_name

-- name: proc_buried
-- Tombstoned tokens of show $1 among the token ranges ($2, $3), as one array.
SELECT ARRAY(
  SELECT b.token
  FROM rota.proc_buried($1::uuid, ARRAY(SELECT ROW(0, run.first, run.last)::rota.ledger_run
                                        FROM unnest($2::bigint[], $3::bigint[]) AS run (first, last))) AS b
)

-- name: proc_bury
-- Tombstone those of the tokens $2 of show $1 that have no proc; returns those that are tombstoned now.
SELECT token FROM rota.proc_bury($1::uuid, $2::bigint[]) AS buried (token)

-- name: proc_delete
-- Delete and tombstone procs of show $1 by token ranges; a row per charge with its tokens and the show's fence.
SELECT managed, fence, pk_alloc, pk_folder, pk_job, pk_layer, pk_dept, cores, gpus, tokens
FROM rota.proc_delete($1::uuid, $2::bigint[], $3::bigint[])

-- name: proc_graves
-- Number of tombstones of each show under its current fence; shows without any are missing.
SELECT g.pk_show, count(*) AS graves
FROM rota.proc_grave g JOIN rota.show s ON s.pk_show = g.pk_show AND s.int_fence = g.int_fence
GROUP BY g.pk_show

-- name: proc_graves_prune
-- Of the $1 tombstones after the key ($2, $3, $4), remove those that are obsolete: their show was deleted or has a higher
-- fence. Returns the last key and the number of removed ones; no row after the last tombstone.
-- Each tombstone is read once, however many are removed: a page starts behind the dead rows of the one before.
WITH page AS MATERIALIZED (
  SELECT g.pk_show, g.int_fence, g.token_last, g.ctid AS place FROM rota.proc_grave g
  WHERE (g.pk_show, g.int_fence, g.token_last) > ($2::uuid, $3::bigint, $4::bigint)
  ORDER BY g.pk_show, g.int_fence, g.token_last LIMIT $1::integer
), removed AS (
  DELETE FROM rota.proc_grave WHERE ctid = ANY (ARRAY(
    SELECT p.place FROM page p LEFT JOIN rota.show s ON s.pk_show = p.pk_show
    WHERE s.pk_show IS NULL OR s.int_fence > p.int_fence))
  RETURNING 1
)
SELECT p.pk_show, p.int_fence, p.token_last, (SELECT count(*) FROM removed) AS removed
FROM page p ORDER BY 1 DESC, 2 DESC, 3 DESC LIMIT 1

-- name: proc_insert
-- Insert procs of show $1 booked under fence $2: the shapes shared by groups, the groups, their token
-- ranges, and the first token and the carrier of each series.
SELECT owner, token, why
FROM rota.proc_insert($1::uuid, $2::bigint,
  ARRAY(SELECT ROW(s.alloc, s.folder, g.job, g.layer, s.dept, s.host, s.cores, s.gpus)::rota.ledger_group
        FROM unnest($9::integer[], $10::uuid[], $11::uuid[]) WITH ORDINALITY AS g (shape, job, layer, place)
        JOIN unnest($3::uuid[], $4::uuid[], $5::uuid[], $6::uuid[], $7::bigint[], $8::bigint[])
          WITH ORDINALITY AS s (alloc, folder, dept, host, cores, gpus, place) ON s.place = g.shape ORDER BY g.place),
  ARRAY(SELECT ROW(r.owner, r.first, r.last)::rota.ledger_run
        FROM unnest($12::integer[], $13::bigint[], $14::bigint[])
          WITH ORDINALITY AS r (owner, first, last, place) ORDER BY r.place),
  $15::bigint[], $16::bigint[])

-- name: proc_page
-- Procs of show $1 with tokens from $2 to $3 that are charged, by token, at most $4.
SELECT token, pk_alloc, pk_folder, pk_job, pk_layer, pk_dept, pk_host, int_cores_reserved AS cores,
       int_gpus_reserved AS gpus, int_fence AS fence
FROM rota.proc
WHERE token BETWEEN $2::bigint AND $3::bigint AND pk_show = $1::uuid
  AND (int_cores_reserved > 0 OR int_gpus_reserved > 0)
ORDER BY token LIMIT $4

-- name: proc_page_groups
-- The next $3 charged procs of show $1 from token $2 on, grouped by charge; a row per charge with its tokens.
WITH page AS (
  SELECT * FROM rota.proc
  WHERE token >= $2::bigint AND pk_show = $1::uuid AND (int_cores_reserved > 0 OR int_gpus_reserved > 0)
  ORDER BY token LIMIT $3
)
SELECT pk_alloc, pk_folder, pk_job, pk_layer, pk_dept, int_cores_reserved AS cores, int_gpus_reserved AS gpus,
       array_agg(token ORDER BY token) AS tokens
FROM page
GROUP BY pk_alloc, pk_folder, pk_job, pk_layer, pk_dept, int_cores_reserved, int_gpus_reserved

-- name: proc_sums
-- Sums of the procs of the shows $1, by all keys they are charged to; one pass over the table.
SELECT pk_show, pk_alloc, pk_folder, pk_job, pk_layer, pk_dept,
       sum(int_cores_reserved)::bigint AS cores, sum(int_gpus_reserved)::bigint AS gpus, count(*) AS procs
FROM rota.proc
WHERE pk_show = ANY ($1::uuid[])
GROUP BY pk_show, pk_alloc, pk_folder, pk_job, pk_layer, pk_dept

-- name: proc_tokens
-- Tokens of the charged procs of show $1 from $2 to $3, in order, as one array.
SELECT ARRAY(
  SELECT token FROM rota.proc
  WHERE token BETWEEN $2::bigint AND $3::bigint AND pk_show = $1::uuid
    AND (int_cores_reserved > 0 OR int_gpus_reserved > 0)
  ORDER BY token
)

-- name: standings
-- Limits of frames of show $1, folder $2, job $3, layer $4 and department $5, with the counters of the tables.
-- Level 0 is the show itself; level 1 has one row per pool.
SELECT 0 AS level, pk_show AS id, b_scheduler_managed AS managed, int_fence AS fence, 0::bigint AS cores_max,
       0::bigint AS gpus_max, 0::bigint AS cores, 0::bigint AS gpus
FROM rota.show WHERE pk_show = $1::uuid
UNION ALL
SELECT 1, pk_alloc, false, 0, int_burst, int_gpu_burst, int_cores, int_gpus FROM rota.subscription WHERE pk_show = $1::uuid
UNION ALL
SELECT 2, pk_folder, false, 0, int_max_cores, int_max_gpus, int_cores, int_gpus
FROM rota.folder_resource WHERE pk_folder = $2::uuid
UNION ALL
SELECT 3, pk_job, false, 0, int_max_cores, int_max_gpus, int_cores, int_gpus FROM rota.job_resource WHERE pk_job = $3::uuid
UNION ALL
SELECT 4, pk_layer, false, 0, int_max_cores, int_max_gpus, int_cores, int_gpus
FROM rota.layer_resource WHERE pk_layer = $4::uuid
UNION ALL
SELECT 5, pk_dept, false, 0, int_max_cores, int_max_gpus, int_cores, int_gpus
FROM rota.point WHERE pk_show = $1::uuid AND pk_dept = $5::uuid
ORDER BY level

-- name: standings_used
-- Usage of show $1 summed from rows, by pool: in total, in folder $2, of job $3, layer $4 and department $5.
SELECT pk_alloc AS alloc, sum(int_cores_reserved)::bigint AS cores, sum(int_gpus_reserved)::bigint AS gpus,
       coalesce(sum(int_cores_reserved) FILTER (WHERE pk_folder = $2::uuid), 0)::bigint AS folder_cores,
       coalesce(sum(int_gpus_reserved) FILTER (WHERE pk_folder = $2), 0)::bigint AS folder_gpus,
       coalesce(sum(int_cores_reserved) FILTER (WHERE pk_job = $3::uuid), 0)::bigint AS job_cores,
       coalesce(sum(int_gpus_reserved) FILTER (WHERE pk_job = $3), 0)::bigint AS job_gpus,
       coalesce(sum(int_cores_reserved) FILTER (WHERE pk_layer = $4::uuid), 0)::bigint AS layer_cores,
       coalesce(sum(int_gpus_reserved) FILTER (WHERE pk_layer = $4), 0)::bigint AS layer_gpus,
       coalesce(sum(int_cores_reserved) FILTER (WHERE pk_dept = $5::uuid), 0)::bigint AS point_cores,
       coalesce(sum(int_gpus_reserved) FILTER (WHERE pk_dept = $5), 0)::bigint AS point_gpus
FROM rota.proc WHERE pk_show = $1::uuid GROUP BY pk_alloc

-- name: limits_told
-- Notify dispatchers that bookings may succeed now which a limit has refused; $1 says why.
SELECT pg_notify('rota_limits', $1::text)

-- name: shows_managed
-- Managed shows with their fences.
SELECT pk_show, int_fence FROM rota.show WHERE b_scheduler_managed ORDER BY pk_show

-- name: ledger_book
-- Book in the five tables of show $1, without limits if $2: the shapes of groups, the groups, their token ranges,
-- and the first token and the carrier of each series.
SELECT owner, token, why, fit, level, resource, current, cap
FROM rota.ledger_book($1::uuid,
  ARRAY(SELECT ROW(s.alloc, s.folder, g.job, g.layer, s.dept, s.host, s.cores, s.gpus)::rota.ledger_group
        FROM unnest($9::integer[], $10::uuid[], $11::uuid[]) WITH ORDINALITY AS g (shape, job, layer, place)
        JOIN unnest($3::uuid[], $4::uuid[], $5::uuid[], $6::uuid[], $7::bigint[], $8::bigint[])
          WITH ORDINALITY AS s (alloc, folder, dept, host, cores, gpus, place) ON s.place = g.shape ORDER BY g.place),
  ARRAY(SELECT ROW(r.owner, r.first, r.last)::rota.ledger_run
        FROM unnest($12::integer[], $13::bigint[], $14::bigint[])
          WITH ORDINALITY AS r (owner, first, last, place) ORDER BY r.place),
  $2::boolean, $15::bigint[], $16::bigint[])

-- name: ledger_counters
-- All nonzero counters of show $1 in the five tables; levels are numbered in the order of the checks.
SELECT 1 AS level, pk_alloc AS id, int_cores AS cores, int_gpus AS gpus
FROM rota.subscription WHERE pk_show = $1::uuid AND (int_cores, int_gpus) <> (0, 0)
UNION ALL
SELECT 2, pk_folder, int_cores, int_gpus
FROM rota.folder_resource WHERE pk_show = $1::uuid AND (int_cores, int_gpus) <> (0, 0)
UNION ALL
SELECT 3, pk_job, int_cores, int_gpus
FROM rota.job_resource WHERE pk_show = $1::uuid AND (int_cores, int_gpus) <> (0, 0)
UNION ALL
SELECT 4, pk_layer, int_cores, int_gpus
FROM rota.layer_resource WHERE pk_show = $1::uuid AND (int_cores, int_gpus) <> (0, 0)
UNION ALL
SELECT 5, pk_dept, int_cores, int_gpus
FROM rota.point WHERE pk_show = $1::uuid AND (int_cores, int_gpus) <> (0, 0)

-- name: ledger_recompute
-- Rewrite the five tables of the unmanaged show $1 from its procs; a row per level with the number of wrong keys.
SELECT level, changed FROM rota.ledger_recompute($1::uuid)

-- name: ledger_rewrite
-- Write the usage of the managed show $1 by its procs into the five tables; a row per level with the number of changes.
SELECT level, changed FROM rota.ledger_mirror($1::uuid)

-- name: shows_unmanaged
-- Unmanaged shows.
SELECT pk_show FROM rota.show WHERE NOT b_scheduler_managed ORDER BY pk_show
