"""Cluster: the replicas of the server, and the registration of workers.

| module | subject |
|---|---|
| `membership` | heartbeats between replicas; which replica dispatches to which worker |
| `worker_registration` | gives a worker that registers its id |

Neither is authoritative for bookings: two replicas that disagree may overfill a worker, which then refuses frames.
"""
