-- Whether runs and sagas have something to hear or to do, from news $1 on, and in how many milliseconds the next timer is due.
SELECT runs, sagas, in_ms FROM rota.workflow_look($1::bigint)
