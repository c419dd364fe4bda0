-- Procs of show $1, of all of it or those charged to pool $2, folder $3 or department $4.
SELECT count(*) FROM rota.proc
WHERE pk_show = $1::uuid AND pk_alloc = coalesce($2::uuid, pk_alloc) AND pk_folder = coalesce($3::uuid, pk_folder)
  AND pk_dept = coalesce($4::uuid, pk_dept)
