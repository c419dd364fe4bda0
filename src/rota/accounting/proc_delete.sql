-- Delete and bury procs of show $1 by runs of tokens; a row per charge says which had it, and the fence of the show.
SELECT managed, fence, pk_alloc, pk_folder, pk_job, pk_layer, pk_dept, cores, gpus, tokens
FROM rota.proc_delete($1::uuid, $2::bigint[], $3::bigint[])
