"""The embedded stack: real PostgreSQL, Valkey (or Redis) and NATS as child processes of one owner.

`rota up` and `rota demo` start it through `LocalStack`; the CLI and the SDK find its API through
`rota.client.endpoint`.

stack                    starts, watches and stops the three servers
server                   base class: port, password, start, probe, stop
postgres, redis, nats    the three servers
process, launch          child processes, and what runs between fork and exec
identity                 the account the servers run as when the owner is root
datadir                  the data directory: lock, ports, passwords
binaries                 finds the server binaries

Invariants and who enforces them:

* One owner per data directory: an exclusive `flock` on `<data>/lock` that the servers inherit, so it is free only
  when the owner *and* every server are gone (`datadir`).
* No server outlives its owner: the kernel's parent-death signal on Linux, a guard process elsewhere (`launch`).
* An incomplete PostgreSQL cluster is never used: `initdb` writes to a temporary directory, which is renamed when
  complete (`postgres`).
* No password in argv or in a file that others can read (`datadir`).
* A failed start leaves nothing running (`stack`).
"""

from rota.local.binaries import BinarySource
from rota.local.stack import LocalStack, StackOptions

__all__ = ["BinarySource", "LocalStack", "StackOptions"]
