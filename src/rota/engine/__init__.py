"""The engine: everything that happens to a job, from submission to its end. See docs/adr/0014-the-pipeline.md.

    submit -> admission -> queue -> claim -> place -> book -> assign -> run -> report -> output check -> complete

| package | stage or subject |
|---|---|
| `submission` | validates jobs and writes them |
| `admission` | policy decisions and approvals, before anything is queued |
| `dispatch` | claims frames, places and books them, sends assignments |
| `completion` | ends attempts, frames and jobs |
| `outputs` | checks what frames return against the output policy |
| `recovery` | lost workers, deadlines, dead letters, retention |
| `resubmission` | retries and replays of ended jobs |
| `cluster` | live replicas, worker registration |
| `events` | event publishing, subscriptions, job histories |
| `explain` | why a job waits |
| `queries` | read models for the API |

`engine.py` wires them into the services of one replica; `rota.runtime` opens the connections. Any number of replicas
run all services: work that must happen once is serialised by row locks, leases and fences in PostgreSQL.
"""
