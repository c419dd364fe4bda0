"""Recovery: background work of elected leaders that repairs lost work and bounds stored data.

| module | subject |
|---|---|
| `reconciler` | silent workers, frames lost in transit, orphaned procs, overdue jobs, interrupted terminations |
| `retention` | daily partitions, expired keys, outputs, workers, approvals and caps; gauges over all live jobs |
| `dead_letter_recorder` | one dead letter per bus message that is given up |

Invariants: every write under a leadership lease carries its fence, which PostgreSQL checks; every step is bounded,
idempotent, and may be interrupted anywhere. The reconciler ends attempts through `engine.completion` only, so a late
result of an old attempt is refused there. The engine starts all three as services.
"""
