"""Publishes audited changes (shows, quotas, pools, topics, runs, approvals) as events; run by one leader.

The audit trail is numbered without gaps in commit order, so no change is skipped. The position comes from the stream
itself: the last message of this subject contains it. Without one (new stream, or an hour without a change) publishing
starts at the end of the trail.

The message id is the number of its first entry: of two leaders that publish the same entries, one gets a duplicate
receipt and reads the other's position. After a crash the next leader goes on from the stream. An event has the names of
the changed objects and the position in the trail, not the author or the content: those require access to the trail.
The same leader reports servers that died (`rota.engine.events.server_presence`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

import structlog

from rota.engine.events.server_presence import ServerPresence
from rota.engine.events.show_names import ShowNameCache
from rota.infra.clock import SystemClock
from rota.infra.lease import LeaderLoop, LeaderStep, Lease, Leases
from rota.infra.nats import Bus, BusMessage, PublishOutcome
from rota.infra.nats.topology import AUDIT_EVENTS_SUBJECT, EVENTS_STREAM
from rota.infra.postgres import Database, Record, query
from rota.model.errors import InvalidInput
from rota.model.events import AUDITED_FAMILIES, EventGroup, EventMessage, join_ids
from rota.model.protocol import decode, encode

READ_ENTRIES = query(__package__, "events_audit")
LAST_ENTRY = query(__package__, "events_audit_last")

log = structlog.get_logger(__name__)
LEASE: Final = "rota:events:audit"
POLL_INTERVAL_S: Final = 1.0
SERVER_CHECK_INTERVAL_S: Final = 5.0
BATCH: Final = 500


class AuditEventPublisher(LeaderLoop):
    def __init__(self, database: Database, bus: Bus, leases: Leases, servers: ServerPresence) -> None:
        super().__init__(leases, LEASE, kind="events")
        self.database = database
        self.bus = bus
        self.servers = servers
        self._shows = ShowNameCache(database, SystemClock())
        self._published: int | None = None

    def begin_term(self, _lease: Lease) -> Sequence[LeaderStep]:
        self._published = None
        return [
            LeaderStep("publish", POLL_INTERVAL_S, self._publish_new),
            LeaderStep("report_lost_servers", SERVER_CHECK_INTERVAL_S, self.servers.report_lost_servers),
        ]

    def on_step_failed(self, step: str, error: Exception) -> None:
        log.info("audit_events_deferred", step=step, reason=str(error))

    async def _publish_new(self) -> None:
        published = self._published if self._published is not None else await self.last_published_seq()
        self._published = await self.publish_after(published)

    async def last_published_seq(self) -> int:
        """The last audit entry that the stream has."""
        last = await self.bus.last_message(EVENTS_STREAM, AUDIT_EVENTS_SUBJECT)
        if last is not None:
            try:
                return decode(EventMessage, last.data).audited
            except InvalidInput as error:
                log.warning("audit_event_unreadable", reason=error.sentence)
        return int(await self.database.value(LAST_ENTRY))

    async def publish_after(self, published: int) -> int:
        """Publish the entries after `published`; returns the last entry published."""
        rows = await self.database.rows(READ_ENTRIES, published, BATCH)
        if not rows:
            return published
        await self._shows.ensure_loaded(_show_id(row) for row in rows)
        batch = EventMessage(self._event_groups(rows), rows[-1]["seq"])
        message = BusMessage(subject=AUDIT_EVENTS_SUBJECT, data=encode(batch), msg_id=f"audit:{published + 1}")
        receipt = await self.bus.publish(message)
        return batch.audited if receipt.outcome is PublishOutcome.STORED else await self.last_published_seq()

    def _event_groups(self, rows: Sequence[Record]) -> list[EventGroup]:
        groups = []
        for row in rows:
            family, _, act = row["action"].partition(".")
            family = "cap" if act == "change" and family in ("job", "layer") else family
            if family in AUDITED_FAMILIES:
                show, name = self._shows.resolve(_show_id(row))
                facts = {"what": row["target"], "audit": row["seq"]}
                jobs = join_ids([UUID(row["job"])]) if row["job"] else b""
                runs = join_ids([UUID(row["run"])]) if row["run"] else b""
                groups.append(EventGroup(f"{family}.{act}", row["at_ms"], show, name, jobs, facts, runs))
        return groups


def _show_id(row: Record) -> UUID | None:
    return UUID(row["show"]) if row["show"] else None
