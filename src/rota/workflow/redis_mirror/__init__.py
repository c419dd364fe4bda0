"""Redis mirror: a copy of timers and sagas in Redis, for people and tools to read. PostgreSQL decides.

| module | subject |
|---|---|
| `timers` | `rota:wf:delay:timers`, a sorted set of timers by due time |
| `sagas` | `saga:<run>:stack` and `saga:<run>:lock` |
| `publisher` | writes changes after their commit, from a bounded queue |
| `reconciler` | one leader that adds missing entries and removes obsolete ones |

The mirror is best effort: a change is dropped when Redis is unavailable or the process dies, and the reconciler repairs
it. The mirror is never read to decide anything.
"""
