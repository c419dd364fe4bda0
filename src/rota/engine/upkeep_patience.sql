-- Wait $1 ms for a lock at most in this transaction: whoever waits for us meanwhile waits no longer either.
SELECT set_config('lock_timeout', $1::text, true)
