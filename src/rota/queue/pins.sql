-- Sessions whose transaction is older than $1 seconds and keeps old row versions alive.
SELECT pid, application, age_s, state FROM rota.queue_pins(make_interval(secs => $1::float8))
