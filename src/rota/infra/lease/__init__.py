"""Leases that PostgreSQL grants, numbers and checks: locks, leadership, guarded writes."""

from rota.infra.lease.grant import Lease, LeaseAcquireResult
from rota.infra.lease.leadership import Leadership
from rota.infra.lease.lease_context import LeaseContext
from rota.infra.lease.leases import Leases

__all__ = ["Leadership", "Lease", "LeaseAcquireResult", "LeaseContext", "Leases"]
