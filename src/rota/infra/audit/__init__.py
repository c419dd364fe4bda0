"""The audit log: an append-only hash chain of actions that makes tampering detectable.

    append    adds entries in the transaction of the action
    query     reads the newest entries
    verify    recomputes the chain from a snapshot
    chain     hashes and link checks, without a database

Invariants: an action and its entry commit together; triggers refuse updates and deletes; secrets are redacted before
they are stored; `verify` trusts no function of the database it checks. Callers: engine, accounting, policy, server
(append); `rota audit` (verify).
"""

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
