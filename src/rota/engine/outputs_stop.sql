-- Nobody need look at output $1 any more.
DELETE FROM rota.scan WHERE token = $1::bigint RETURNING mode
