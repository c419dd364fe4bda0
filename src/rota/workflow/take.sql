-- Lock up to $1 runs that have news, from $2 on, or a timer that is due, and take all of it; those that somebody else is at are left.
SELECT * FROM rota.workflow_take($1::int, $2::bigint)
