"""The audit trail: who did what, in a chain of hashes that shows when it was tampered with."""

from rota.infra.audit.append import append
from rota.infra.audit.chain import AuditEntry, ChainHead, ChainProblem
from rota.infra.audit.query import AuditRecord, newest_entries
from rota.infra.audit.verify import VerificationReport, verify

__all__ = [
    "AuditEntry",
    "AuditRecord",
    "ChainHead",
    "ChainProblem",
    "VerificationReport",
    "append",
    "newest_entries",
    "verify",
]
