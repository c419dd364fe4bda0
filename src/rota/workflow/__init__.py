"""Workflows: definitions, runs, timers, sagas.

| module | what it does |
|---|---|
| `definitions` | versions of definitions, and those that are in use, compiled |
| `sagas` | what undoes jobs, recorded and carried out in reverse |
| `turns` | a run that is being advanced: what was read of it, and what is to be written |
| `advancing` | one transaction: news and timers, decisions, next jobs, state and history |
| `approving` | steps that wait for people: asked for, locked, decided, withdrawn |
| `advancer` | the service: when to look, and what to do when a batch fails |
| `rerunning` | what a run that begins at a step takes over |
| `desk` | what people ask for: start, cancel, pause, resume, rerun, rollback |
| `telling` | what happened, as events |
| `explaining` | what a run waits for |
| `watching` | the history of runs that somebody follows |
| `looking` | runs as they are shown |
| `timer_index`, `saga_mirror` | what Redis shows of timers and sagas |
| `mirror` | tells Redis of changes, off everybody's way |
| `poller` | keeps what Redis shows in line with PostgreSQL |
| `reconciler` | the net: `mending` what waits in vain, `pruning` what ended long ago |

All of it follows docs/adr/0021-workflows.md. `rota.model.workflows.state_machine` decides. PostgreSQL enforces T1 (a timer is
deleted when it is due, by its own clock, in the transaction of what follows) and F1 (the lock of the run's row, and the
fence that every write names). W1 is kept by `sagas`.
"""
