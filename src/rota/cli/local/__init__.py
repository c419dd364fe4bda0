"""`rota up`, `rota down` and `rota status`: Rota on one machine.

`up` starts the local stack, one server replica and a worker process; the lock of the data directory says which process
owns it. Other commands find the local URLs with `up.local_url`.

| module | content |
|---|---|
| `up` | start, stop, status, `up.json` |
| `api_key` | the API key of the local instance |
| `embedded_worker` | the worker process that `up` supervises |
"""
