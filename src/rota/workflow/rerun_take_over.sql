-- What undoes the jobs $3 belongs to run $2 of show $1 from now on.
WITH before AS (
  UPDATE rota.saga s SET fence = s.fence
  WHERE s.pk_saga IN (SELECT e.pk_saga FROM rota.saga_entry e WHERE e.pk_job = ANY ($3::uuid[]))
), made AS (
  INSERT INTO rota.saga (pk_show, workflow_id) VALUES ($1::uuid, $2::text) RETURNING pk_saga
)
UPDATE rota.saga_entry e SET pk_saga = made.pk_saga FROM made WHERE e.pk_job = ANY ($3::uuid[]) AND e.state = 'pending'
