"""Leases granted by PostgreSQL: locks with a TTL, leader election and fenced writes.

    leases           acquire, renew, release, `guard` (checks the fencing token inside a transaction), prune
    lease_context    `async with leases.hold(...)`: renews in the background, cancels the body when the lease is lost
    leadership       leader election: runs a coroutine on the one replica that holds a lease
    leader_loop      `LeaderLoop`: periodic steps that the leader runs, each with its interval, retried with backoff
    grant            the `Lease` struct and the metrics

Invariants: fencing tokens only increase, even after release, expiry and prune; only PostgreSQL's clock decides expiry;
a write under a lease counts only if `guard` ran in its transaction. Callers: every leader loop of engine, queue,
accounting, workflow and agents.
"""

from rota.infra.lease.grant import Lease, LeaseAcquireResult
from rota.infra.lease.leader_loop import LeaderLoop, LeaderStep
from rota.infra.lease.leadership import Leadership
from rota.infra.lease.lease_context import LeaseContext
from rota.infra.lease.leases import Leases

__all__ = ["LeaderLoop", "LeaderStep", "Leadership", "Lease", "LeaseAcquireResult", "LeaseContext", "Leases"]
