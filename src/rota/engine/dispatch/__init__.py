"""Dispatch: claim waiting frames, place them on workers, book them against quota, and send the assignments.

Every replica dispatches, each for the workers it owns (`rota.engine.cluster.membership`). `rota.engine.engine` runs
the `Dispatcher` as a service; completion and recovery call `Dispatcher.frames_released` after they free capacity.

| module | responsibility |
|---|---|
| `dispatcher` | the loop: starts rounds, claims, returns claims that were not booked |
| `ordering` | which queue is served first, and how much it may take; pure |
| `pending_queues` | the queues with waiting frames, back-off after refusals; no I/O |
| `queue_groups` | these queues by show and pools, in order; pure |
| `minimums` | what folders and departments lack of their minimums; pure |
| `share_rooms` | what is left of shares that have refused, reserved by rounds in scheduling order; no I/O |
| `rounds` | what the next round takes, and where it would run; no I/O |
| `series` | which frames share a slot, one after the other, and how many; pure |
| `series_recall` | which of them are asked back, because a slot is idle or a higher priority waits; no I/O |
| `booking_requests` | what is booked for a claimed batch; no I/O |
| `pending_reader` | reads counts, ages and shares from PostgreSQL |
| `assigner` | a claimed batch: load, book, return refused frames, publish assignments |
| `parked_jobs` | jobs at their own cap, unparked when capacity is released |
| `concurrency_limits` | running jobs per show (`int_max_jobs`, policy budgets) |
| `state_writer` | batched DISPATCHED and RUNNING state changes |
| `metrics` | waiting frames and jobs by reason |

Invariants: a frame has one owner (the queue's claims, fenced by the dispatcher's lease); quota is never exceeded (the
ledger decides); workers are never overcommitted (each worker refuses what does not fit). In-memory state here is a
cache: when it is stale, it costs a refused or empty attempt.
"""
