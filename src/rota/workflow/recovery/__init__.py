"""Recovery of workflows: a safety net for lost wake-ups, and retention.

| module | subject |
|---|---|
| `reconciler` | the leader's loop |
| `stuck_runs` | finds and repairs runs and sagas that wait for an event that will not come |
| `retention` | deletes ended runs, sagas and old versions |

Every write checks the leader's fence in its transaction. `stuck_runs` should find nothing; each repair is logged.
"""
