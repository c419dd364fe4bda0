"""Recovery of agents: runs, Redis entries and due times that a crash, a pause or an outage left behind.

| module | responsibility |
|---|---|
| `zombies_and_orphans` | runs past their deadline, runs of dead members, stale and unknown entries in Redis |
| `reconciler` | declares agents, refreshes the member list, repopulates Redis from PostgreSQL |

`rota.agents.scheduler` runs each as a periodic task. Entries are moved by the run number they were read with, after
PostgreSQL was queried, so concurrent or delayed passes are safe.
"""
