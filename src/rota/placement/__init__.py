"""Where frames run: pools and topics, the workers that are known, and who gets what.

What holds, and who sees to it:

- All replicas route alike: pools and topics are rows in PostgreSQL, read anew on every change (`Routing`).
- No plan goes beyond what a worker offers and has free, and no room is planned twice (`Registry`).
- Only a pool that is mapped to the topic, provides what is required and is active gets a frame (`explaining.eligible`),
  and of it only a live worker with the labels that are asked for (`Worker.lacks`).
- Plans and explanations ask the same functions, so they cannot disagree.

Nothing in memory must survive: a replica that starts reads the snapshot (`warm_start`), which may be missing, old or
broken, and hears every live worker within a heartbeat's interval. What is booked is in PostgreSQL, and a worker that
lists frames this replica did not book gets nothing until they were looked up there (`HeartbeatListener`).
"""

from rota.placement.plan import CapacityReservation, ExcludedWorker, PlacementExplanation, PlacementPlan, WorkerShare
from rota.placement.registry import HeartbeatOutcome, WorkerRegistry
from rota.placement.requirements import PlacementRequirements, Resources, requirements_of
from rota.placement.topic_routes import Pool, PoolSpec, PoolStatus, Routes
from rota.placement.worker_ownership import owning_replica, owns_worker
from rota.placement.workers import WorkerInfo

# Imported where they are used, since they bring their servers' clients along: `routing.Routing`, `routing.RoutesWatch`,
# `listening.HeartbeatListener`, `snapshot.SnapshotWriter`, `snapshot.warm_start`.

__all__ = [
    "CapacityReservation",
    "ExcludedWorker",
    "HeartbeatOutcome",
    "PlacementExplanation",
    "PlacementPlan",
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
