-- Give show $1 a point of department $2, without limits.
INSERT INTO rota.point (pk_show, pk_dept) VALUES ($1::uuid, $2::uuid)
