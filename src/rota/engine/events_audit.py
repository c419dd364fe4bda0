"""Changes that people made to shows, quotas, pools, topics and runs, and what they approved, told as events: read from
the audit trail by one leader.

The trail is numbered without a hole in the order of commits, so nothing is passed over, whoever made the change. Up to
where it was told is known from the stream itself: the last message of this kind says so. Where there is none (the
stream is new, or an hour passed without a change) it begins at the end of the trail.

A message goes by the number of its first entry: of two leaders who tell the same one is refused as a duplicate, and
looks where the other has come to. If we die, the next leader goes on from the stream. Told are the names of what was
changed and where it stands in the trail, not by whom or how: who may read that reads the trail. The same leader sees
to servers that went without a word (`rota.engine.events_servers`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count
from typing import Final
from uuid import UUID

import structlog

from rota.engine.events_servers import Servers
from rota.engine.events_shows import Shows
from rota.infra.clock import SystemClock
from rota.infra.lease import Leadership, Lease, Leases
from rota.infra.nats import Bus, Message, Outcome
from rota.infra.nats.declared import EVENTS, EVENTS_AUDITED
from rota.infra.postgres import Database, Record, query
from rota.infra.service import Lifecycle
from rota.model.errors import InvalidInput, NatsUnavailable
from rota.model.events import CHANGED, Batch, Group, joined
from rota.model.messages import decode, encode

READ = query(__package__, "events_audit")
LAST = query(__package__, "events_audit_last")

log = structlog.get_logger(__name__)
LEASE: Final = "rota:events:audit"
EVERY_S: Final = 1.0
JUDGE_EVERY: Final = 5
BATCH: Final = 500


class AuditTeller:
    def __init__(self, database: Database, bus: Bus, leases: Leases, servers: Servers) -> None:
        self.database = database
        self.bus = bus
        self.servers = servers
        self._shows = Shows(database, SystemClock())
        self._leadership = Leadership(leases, LEASE, self._lead, kind="events")

    async def run(self, life: Lifecycle) -> None:
        life.ready()
        await self._leadership.serve(life)

    async def _lead(self, _lease: Lease) -> None:
        told: int | None = None
        for turn in count():
            try:
                told = await self.step(told if told is not None else await self.told())
                if turn % JUDGE_EVERY == 0:
                    await self.servers.judge()
            except NatsUnavailable as away:
                log.info("changes_wait", reason=away.sentence)
            await asyncio.sleep(EVERY_S)

    async def told(self) -> int:
        """Up to which entry the stream has them."""
        last = await self.bus.last_of(EVENTS, EVENTS_AUDITED)
        if last is not None:
            try:
                return decode(Batch, last.data).audited
            except InvalidInput as error:
                log.warning("changes_unreadable", reason=error.sentence)
        return int(await self.database.value(LAST))

    async def step(self, told: int) -> int:
        """Tell what comes after entry `told`, and say up to where it is told now."""
        rows = await self.database.rows(READ, told, BATCH)
        if not rows:
            return told
        await self._shows.learn(_show(row) for row in rows)
        batch = Batch(self._groups(rows), rows[-1]["seq"])
        message = Message(subject=EVENTS_AUDITED, data=encode(batch), msg_id=f"audit:{told + 1}")
        receipt = await self.bus.publish(message)
        return batch.audited if receipt.outcome is Outcome.STORED else await self.told()

    def _groups(self, rows: Sequence[Record]) -> list[Group]:
        groups = []
        for row in rows:
            family, _, act = row["action"].partition(".")
            family = "cap" if act == "change" and family in ("job", "layer") else family
            if family in CHANGED:
                show, name = self._shows.known(_show(row))
                facts = {"what": row["target"], "audit": row["seq"]}
                jobs = joined([UUID(row["job"])]) if row["job"] else b""
                runs = joined([UUID(row["run"])]) if row["run"] else b""
                groups.append(Group(f"{family}.{act}", row["at_ms"], show, name, jobs, facts, runs))
        return groups


def _show(row: Record) -> UUID | None:
    return UUID(row["show"]) if row["show"] else None
