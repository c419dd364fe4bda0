-- Give show $1 a share of pool $2, with nothing in it yet; $3 is its id.
INSERT INTO rota.subscription (pk_subscription, pk_show, pk_alloc) VALUES ($3::uuid, $1::uuid, $2::uuid)
