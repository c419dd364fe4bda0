"""Approvals: rows of `rota.approval`, with one row per vote.

Invariants and who enforces them:
- A subject has at most one pending approval: a unique index.
- The hash is that of the subject's first approval, whatever is stored later: `approvals_request`.
- Each voter counts once, and votes are counted under the lock of the approval: the primary key, `approvals_lock`.
- An approval is decided once: the deciding statement requires that it is pending.

Lock order: subject, then approval. Everything runs in the caller's transaction: a crash before the commit changes
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import msgspec

from rota.infra import failpoints
from rota.infra.postgres import Database, Record, Transaction, query
from rota.infra.telemetry import metrics
from rota.model.approvals import Approval, ApprovalKind, ApprovalRequest, ApprovalState, Vote
from rota.model.errors import NotFound
from rota.model.ids import ShowId

REQUEST = query(__package__, "approvals_request")
LOCK = query(__package__, "approvals_lock")
VOTE = query(__package__, "approvals_vote")
DECIDE = query(__package__, "approvals_decide")
READ = query(__package__, "approvals_read")
LATEST = query(__package__, "approvals_latest")
LIST = query(__package__, "approvals_list")
OVERDUE = query(__package__, "approvals_due")
PENDING_COUNTS = query(__package__, "approvals_depth")
FORGET = query(__package__, "approvals_forget")

WAITING = metrics.gauge("rota_approval_queue_depth", "Pending approvals.", labels=("kind",))
LATENCY = metrics.histogram(
    "rota_approval_latency_seconds",
    "From the request of an approval to its decision.",
    labels=("kind",),
    buckets=(1, 10, 60, 300, 900, 3_600, 14_400, 86_400, 604_800),
)
EXPIRED = metrics.counter("rota_approval_expired", "Approvals that expired.", labels=("kind",))
DECISIONS = metrics.counter("rota_approval_decisions", "Decided approvals, by decision.", labels=("kind", "decision"))


class ApprovalStore:
    def __init__(self, database: Database) -> None:
        self.database = database

    async def request(self, on: Transaction, requests: Sequence[ApprovalRequest]) -> list[Approval]:
        """Request approvals for subjects without a pending one; returns the new approvals."""
        if not requests:
            return []
        rows = await on.rows(
            REQUEST,
            [each.id or uuid4() for each in requests],
            [each.kind for each in requests],
            [each.subject for each in requests],
            [each.show for each in requests],
            [each.hash for each in requests],
            [each.title for each in requests],
            [each.reason for each in requests],
            [each.rule for each in requests],
            [each.snapshot for each in requests],
            [max(1, each.terms.quorum) for each in requests],
            [msgspec.json.encode(each.terms.approvers).decode() for each in requests],
            [each.principal for each in requests],
            [each.actor for each in requests],
            [each.terms.expires_s for each in requests],
        )
        return list(await self._read(on, [row["pk_approval"] for row in rows]))

    async def get(self, approval: UUID, *, on: Transaction | None = None) -> Approval:
        found = await self._read(on or self.database, [approval])
        if not found:
            raise NotFound(f"There is no approval {approval}, or it is not kept any more.", approval=str(approval))
        return found[0]

    async def lock(self, on: Transaction, approval: UUID) -> Approval:
        """The current approval, locked until the transaction ends."""
        await on.rows(LOCK, approval)
        return await self.get(approval, on=on)

    async def latest(
        self, kind: ApprovalKind, subjects: Sequence[str], *, on: Transaction | None = None
    ) -> dict[str, Approval]:
        """The most recent approval of each subject that has one."""
        rows = await (on or self.database).rows(LATEST, kind, list(subjects))
        found = await self._read(on or self.database, [row["pk_approval"] for row in rows])
        return {each.subject: each for each in found}

    async def list(
        self,
        *,
        state: ApprovalState | None = ApprovalState.PENDING,
        kind: ApprovalKind | None = None,
        shows: Sequence[ShowId] | None = None,
        after: UUID | None = None,
        most: int = 100,
    ) -> list[Approval]:
        """Approvals, oldest first; `after` is the last id of the previous page."""
        rows = await self.database.rows(LIST, state, kind, None if shows is None else list(shows), after, most)
        by_id = {each.id: each for each in await self._read(self.database, [row["pk_approval"] for row in rows])}
        return [by_id[row["pk_approval"]] for row in rows if row["pk_approval"] in by_id]

    async def vote(self, on: Transaction, approval: Approval, voter: str, reason: str, *, agrees: bool) -> Approval:
        """Record a vote on a locked approval. The first vote of a voter stays."""
        await on.run(VOTE, approval.id, voter, agrees, reason)
        failpoints.hit("approvals.after_vote")
        return await self.get(approval.id, on=on)

    async def decide(self, on: Transaction, approval: Approval, state: ApprovalState) -> bool:
        """Move it from pending to a final state; False if it was not pending."""
        return bool(await on.run(DECIDE, approval.id, state.value))

    async def overdue(self, most: int) -> Sequence[UUID]:
        """Pending approvals past their expiry."""
        return [row["pk_approval"] for row in await self.database.rows(OVERDUE, most)]

    async def update_metrics(self) -> None:
        """Update the gauge of pending approvals."""
        for row in await self.database.rows(PENDING_COUNTS):
            WAITING.labels(row["kind"]).set(row["pending"])

    async def _read(self, on: Database | Transaction, ids: Sequence[UUID]) -> Sequence[Approval]:
        return [_approval_from_row(row) for row in await on.rows(READ, list(ids))] if ids else []


def record_decision(approval: Approval, state: ApprovalState, now: datetime) -> None:
    """Update the metrics of a committed decision."""
    DECISIONS.labels(approval.kind, state.value).inc()
    LATENCY.labels(approval.kind).observe(max(0.0, (now - approval.requested_at).total_seconds()))
    if state is ApprovalState.EXPIRED:
        EXPIRED.labels(approval.kind).inc()


def _approval_from_row(row: Record) -> Approval:
    columns: dict[str, Any] = dict(row.items())
    votes = msgspec.json.decode(columns.pop("votes"), type=list[Vote])
    columns |= {
        "state": ApprovalState(row["state"]),
        "show_id": ShowId(row["show_id"]),
        "approvers": tuple(row["approvers"]),
        "votes": tuple(votes),
    }
    return Approval(**columns)
