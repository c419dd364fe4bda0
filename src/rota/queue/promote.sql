-- Queue up to $1 deferred entries whose time has come.
SELECT rota.queue_promote($1::int)
