"""Workflows: definitions, runs, timers and sagas.

| module | subject |
|---|---|
| `definitions`, `yaml_loader` | versions of definitions, and a cache of compiled ones; definitions from YAML |
| `run_commands` | commands: start, cancel, pause, resume, rerun, roll back |
| `executor` | the service that advances runs: when to poll, and how to handle a failed batch |
| `advance_transaction` | one transaction: inbox and timers, decisions, next jobs, state and history |
| `run_context` | one run in that transaction: state read, inbox, transition to write |
| `inbox_cursor` | lowest inbox id that can still be unprocessed |
| `step_approvals` | approval steps: request, lock, decide, withdraw |
| `sagas` | compensations, recorded and carried out in reverse |
| `rerun` | the steps and compensations that a rerun takes over |
| `run_events`, `run_history` | changes of runs as events; histories for watchers |
| `run_queries`, `explain` | read models of runs; what a run waits for |
| `redis_mirror` | a copy of timers and sagas in Redis, for people to read |
| `recovery` | repairs stuck runs and sagas; retention |

The design is docs/adr/0021-workflows.md. `rota.model.workflows.state_machine` decides, without I/O. PostgreSQL enforces
T1 (a timer is deleted when it is due, by PostgreSQL's clock, in the transaction of its effect) and F1 (a lock on the
run's row, and a fence that every write checks). `sagas` ensures W1. The HTTP API calls `RunCommands` and `RunQueries`;
every replica runs the executor; leaders run `redis_mirror.reconciler` and `recovery.reconciler`.
"""
