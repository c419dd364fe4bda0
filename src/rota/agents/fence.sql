-- Fail unless the lease $1 with fence $2 is the last one that was granted and still runs.
SELECT rota.assert_fence($1::text, $2::bigint)
