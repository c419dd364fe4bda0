"""The embedded stack: real PostgreSQL, Valkey (or Redis) and NATS as child processes of one owner.

Invariants, and who enforces each:

* One owner per data directory: an exclusive `flock` on `<data>/lock` that the servers inherit, so it is free only
  when the owner *and* every server are gone (`datadir`).
* No server outlives its owner: the kernel's parent-death signal on Linux, a guard process elsewhere (`launch`).
* A half-made PostgreSQL cluster is never used: `initdb` works beside and is renamed when complete (`postgres`).
* No password in argv or in a file others may read (`datadir`).
* A failed start leaves nothing running (`stack`).
"""

from rota.local.binaries import BinarySource
from rota.local.stack import LocalStack, StackOptions

__all__ = ["BinarySource", "LocalStack", "StackOptions"]
