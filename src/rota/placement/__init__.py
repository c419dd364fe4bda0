"""Placement: pools and topics, the registry of live workers, and which worker gets which frames.

The dispatcher asks for a plan, reserves its capacity, claims and books. Invariants and what enforces them:

- All replicas route alike: pools and topics are rows in PostgreSQL, reread on every change (`RouteStore`).
- No plan exceeds what a worker offers and has free, and no capacity is planned twice (`WorkerRegistry`).
- A frame goes only to a pool that is mapped to the topic, provides the required capabilities and is active
  (`explain.eligible_pools`), and there only to a live worker with the required labels (`WorkerInfo.mismatch_reason`).
- Plans and explanations use the same functions, so they cannot disagree.

Memory need not survive: a starting replica reads the snapshot (`warm_start`), which may be missing, old or broken, and
receives a heartbeat of every live worker within one interval. PostgreSQL knows what is booked: a worker that lists
frames this replica did not book gets no more until they were looked up there (`HeartbeatConsumer`).

| module | responsibility |
|---|---|
| `registry`, `workers`, `worker_allocations` | live workers, their capacity and allocations |
| `ranking`, `scoring`, `plan`, `explain` | the choice of workers, and why frames are not placed |
| `requirements` | what a frame requires of a worker |
| `topic_routes`, `route_store`, `pools_file`, `pools_watch` | pools and topics, their storage and `pools.yaml` |
| `heartbeat_consumer`, `snapshot` | inputs of the registry: heartbeats and the Redis snapshot |
| `worker_ownership` | which replica dispatches to which worker |
"""

from rota.placement.plan import CapacityReservation, PlacementExplanation, PlacementPlan, WorkerShare
from rota.placement.registry import HeartbeatOutcome, WorkerRegistry
from rota.placement.requirements import PlacementRequirements, Resources, requirements_of
from rota.placement.topic_routes import PlacementPolicy, Pool, PoolSpec, PoolStatus, Routes
from rota.placement.worker_ownership import owning_replica, owns_worker
from rota.placement.workers import WorkerInfo

# Not imported here, because they bring the clients of their servers along: `route_store`, `heartbeat_consumer` and
# `snapshot`.

__all__ = [
    "CapacityReservation",
    "HeartbeatOutcome",
    "PlacementExplanation",
    "PlacementPlan",
    "PlacementPolicy",
    "PlacementRequirements",
    "Pool",
    "PoolSpec",
    "PoolStatus",
    "Resources",
    "Routes",
    "WorkerInfo",
    "WorkerRegistry",
    "WorkerShare",
    "owning_replica",
    "owns_worker",
    "requirements_of",
]
