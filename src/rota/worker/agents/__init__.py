"""Recurring agents of an app, run by its worker: async bodies on the event loop, sync bodies in killable processes.

Acquisition, permits and fencing are in `rota.agents`; this package runs the bodies. A sync body never outlives the
worker's lease by more than `KILL_GRACE_S`: a watchdog process kills it when renewals stop.

| module | subject |
|---|---|
| `runner` | the service: connects PostgreSQL and Redis, starts the scheduler |
| `process_runner`, `process_main`, `process_messages` | sync bodies in child processes (`rota.worker.processes`) |
| `lease_watchdog_process` | kills a body whose lease is not renewed |
| `events` | publishes agent events to NATS |

Caller: `rota worker` (`rota.cli.worker`), for apps that declare agents.
"""
