-- The sagas $1 have nothing left to undo.
SELECT rota.saga_end($1::bigint[])
