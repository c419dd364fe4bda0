"""Recurring work: named agents that run on an interval, by cron or at a moment, on whichever replica takes them.

| module | what it does |
|---|---|
| `sets` | who is due and who runs, in Redis: one script per move |
| `records` | what agents are, who may run and what came of it, in PostgreSQL |
| `registry` | which agents this replica may run, and which of them first |
| `acquisition` | one cycle: permits, candidates, acquire, begin |
| `runs` | runs under way here: permits, timers, stopping |
| `endings` | how runs end: history and the next due time, then Redis; repeated until both know |
| `cleanup` | zombies of this replica, orphans of others |
| `health` | what the loop says about itself |
| `scheduler` | the service: a lease, the loop, and an end in order |

All of it follows docs/adr/0018-agents.md. PostgreSQL enforces T1 and T2 (`rota.agents_begin`: due, and one row per
agent in `rota.agent_running`) and F1 (`rota.assert_fence` in each write). Redis finds who is due; where it is wrong it
costs a round trip, and never a run too many.
"""
