"""The audit trail: who did what, in a chain of hashes that shows when it was tampered with."""

from rota.infra.audit.chain import AuditEntry, Head, Problem
from rota.infra.audit.reading import Recorded, newest
from rota.infra.audit.trail import append
from rota.infra.audit.verify import Report, verify

__all__ = ["AuditEntry", "Head", "Problem", "Recorded", "Report", "append", "newest", "verify"]
