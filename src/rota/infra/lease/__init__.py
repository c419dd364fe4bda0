"""Leases that PostgreSQL grants, numbers and checks: locks, leadership, guarded writes."""

from rota.infra.lease.grant import Attempt, Lease
from rota.infra.lease.hold import Hold
from rota.infra.lease.leadership import Leadership
from rota.infra.lease.leases import Leases

__all__ = ["Attempt", "Hold", "Leadership", "Lease", "Leases"]
