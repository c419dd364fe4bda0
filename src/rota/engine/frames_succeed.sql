-- End frames of worker $1 that returned nothing: claims and bitmaps, the same as runs of tokens, and what they took.
SELECT what, claim_id, refused, pk_show, managed, fence, pk_alloc, pk_folder, pk_dept, cores, gpus, jobs, layers, tokens,
       topic, state, workflow_id
FROM rota.frames_succeed($1::uuid, $2::bigint[], $3::varbit[], $4::bigint[], $5::bigint[], $6::bigint)
