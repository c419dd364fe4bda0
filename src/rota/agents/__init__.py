"""Agents: named recurring work on an interval, by cron or at a given time, run by whichever replica acquires it.

| module | responsibility |
|---|---|
| `scheduler` | the service: cycle loop under the member lease, orderly shutdown |
| `membership`, `lease_watchdog` | the member lease; stops bodies, or the process, when it expires |
| `acquisition` | one cycle: finds the due agents that this replica may run |
| `run_claims`, `run_starter` | permit, acquire in Redis, begin in PostgreSQL; start of the run, or its immediate end |
| `redis_index` | due and running agents in Redis, one script per transition |
| `repository` | specs, due times, runs and history in PostgreSQL |
| `registry` | which agents this replica may run, and which of them first |
| `running` | active runs: task, permit, timer, stop, quarantine |
| `completion` | ends runs in PostgreSQL, then Redis, retried until both are done |
| `recovery` | zombies, runs of dead members, orphaned entries, repopulation of Redis |
| `poll_interval`, `circuit_breakers`, `concurrency_permits` | pacing, breakers and capacity of the loop |
| `health`, `health_summary`, `metrics`, `events` | what operators see |
| `admin` | list, pause, resume, trigger, backfill, remove |
| `job_agents` | agents that submit a job, run by servers |

`rota.runtime` runs a scheduler for job agents; `rota.worker` runs one for the agents of an app; the HTTP API calls
`AgentAdmin`. See docs/adr/0018-agents.md.

Invariants: an agent has at most one run and begins only when due (T1, T2: `rota.agents_begin`, one row per agent in
`rota.agent_running`); a member whose lease expired writes nothing (F1: `rota.assert_fence` in each write). Redis only
finds due agents: a wrong entry costs a round trip, never an extra run.
"""
