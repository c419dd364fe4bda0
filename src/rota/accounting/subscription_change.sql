-- Change what show $1 may use of pool $2; null keeps what is there.
UPDATE rota.subscription
SET int_size = coalesce($3::bigint, int_size), int_burst = coalesce($4::bigint, int_burst),
    int_gpu_burst = coalesce($5::bigint, int_gpu_burst)
WHERE pk_show = $1::uuid AND pk_alloc = $2::uuid
