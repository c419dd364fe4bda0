-- name: submit_insert
-- Write jobs with everything that belongs to them. Returns a row for each job that existed before, or for each reason
-- why nothing was written.
SELECT at, outcome, pk_job, state FROM rota.job_submit(
  $1::text[], $2::text[], $3::text[], $4::bytea[], $5::smallint[],
  $6::int[], $7::text[], $8::text[], $9::smallint[], $10::text[], $11::text[], $12::smallint[], $13::jsonb[],
  $14::bytea[], $15::bigint[], $16::bigint[], $17::timestamptz[], $18::bytea[], $19::timestamptz,
  $20::int[], $21::smallint[], $22::text[], $23::bytea[], $24::int[], $25::int[], $26::int[], $27::text[],
  $28::boolean[],
  $29::uuid[], $30::int[], $31::text[], $32::text[], $33::bytea[],
  $34::uuid[], $35::int[], $36::int[], $37::bytea[], $38::text[],
  $39::int[], $40::uuid[], $41::uuid[], $42::int[], $43::int[], $44::bytea[], $45::timestamptz[],
  $46::uuid[], $47::uuid[], $48::int[], $49::int[], $50::bigint[], $51::bigint[],
  $52::uuid[], $53::bytea[])

-- name: submit_insert_one
-- Write one job of one layer with its key and queue entry. Returns a row if it existed before, or with the reason why it
-- was not written.
SELECT at, outcome, pk_job, state FROM rota.job_submit_one(
  $1::text, $2::text, $3::text, $4::bytea, $5::smallint, $6::text, $7::text, $8::jsonb, $9::bytea, $10::bigint,
  $11::bigint, $12::bytea, $13::timestamptz, $14::uuid, $15::text, $16::text, $17::bytea, $18::uuid, $19::text,
  $20::bytea, $21::bytea, $22::int, $23::int, $24::int)

-- name: submit_names
-- Existing shows, folders of show $1 and departments, for the error message about an unknown name.
SELECT 'show' AS kind, str_name AS name FROM rota.show
UNION ALL SELECT 'folder', f.str_name FROM rota.folder f JOIN rota.show s USING (pk_show) WHERE s.str_name = $1::text
UNION ALL SELECT 'dept', str_name FROM rota.dept
ORDER BY kind, name LIMIT 10000

-- name: submit_queues
-- The queues of these targets, created if new; null where the show, folder or department is unknown.
SELECT g.at::integer AS at, rota.job_queue(
  g.show, g.folder, g.dept, g.digest, g.topic, ARRAY(SELECT jsonb_array_elements_text(g.requires)), g.labels,
  nullif(g.pool, ''), nullif(g.worker, ''), g.cores, g.gpus, g.memory_mb) AS queue
FROM unnest($1::text[], $2::text[], $3::text[], $4::bytea[], $5::text[], $6::jsonb[], $7::jsonb[], $8::text[],
            $9::text[], $10::bigint[], $11::int[], $12::bigint[]) WITH ORDINALITY
  AS g (show, folder, dept, digest, topic, requires, labels, pool, worker, cores, gpus, memory_mb, at)
ORDER BY g.show COLLATE "C", g.folder COLLATE "C", g.dept COLLATE "C", g.digest

-- name: submit_take_key
-- Take key $2 of show $1 for job $3 and the others of its bulk; $4: digest of the bulk. Waits for a concurrent transaction
-- with the same key. No row: it is taken, or there is no such show.
INSERT INTO rota.idempotency_key (pk_show, key, pk_job, digest)
SELECT s.pk_show, $2::text, $3::uuid, $4::bytea FROM rota.show s WHERE s.str_name = $1::text
ON CONFLICT DO NOTHING RETURNING 1

-- name: submit_known_key
-- Job and digest of key $2 of show $1.
SELECT k.pk_job, k.digest FROM rota.idempotency_key k
WHERE k.pk_show = (SELECT s.pk_show FROM rota.show s WHERE s.str_name = $1::text) AND k.key = $2::text

-- name: submit_states
-- States of those of the jobs $1 that are kept.
SELECT j.pk_job, j.state FROM rota.job j WHERE j.pk_job = ANY ($1::uuid[])
UNION ALL SELECT d.pk_job, d.state FROM rota.job_done d WHERE d.pk_job = ANY ($1::uuid[])

-- name: submit_unknown
-- Those of the jobs $1 that do not exist, neither live nor done.
SELECT given.id FROM unnest($1::uuid[]) AS given (id)
WHERE NOT EXISTS (SELECT FROM rota.job j WHERE j.pk_job = given.id)
  AND NOT EXISTS (SELECT FROM rota.job_done d WHERE d.pk_job = given.id)

-- name: submit_wait
-- Make jobs $1 wait for jobs $2, with the action $3 for the case that the dependency does not succeed.
SELECT rota.jobs_wait($1::uuid[], $2::uuid[], $3::text[])
