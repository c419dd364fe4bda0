-- End the share of show $1 in pool $2.
DELETE FROM rota.subscription WHERE pk_show = $1::uuid AND pk_alloc = $2::uuid
