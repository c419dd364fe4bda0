"""Queues as people see them: whose they are, and how many frames are where."""

from __future__ import annotations

import msgspec

from rota.api.resources import QueueView
from rota.infra import audit
from rota.infra.audit import AuditEntry
from rota.infra.postgres import Database, query
from rota.model.ids import ShowId
from rota.queue import Queue, QueueCounts

QUEUE_OWNERS = query(__package__, "queues_owned")


class QueueOwner(msgspec.Struct, frozen=True):
    """Those that nobody owns were not made by submitting jobs."""

    show: ShowId
    name: str
    topic: str


async def queue_owners(database: Database) -> dict[str, QueueOwner]:
    return {
        row["queue"]: QueueOwner(row["pk_show"], row["show"], row["topic"]) for row in await database.rows(QUEUE_OWNERS)
    }


async def queue_views(queue: Queue) -> dict[str, tuple[QueueView, QueueOwner | None]]:
    """By name; counts are exact."""
    owned, counts = await queue_owners(queue.database), await queue.counts_exact()
    found: dict[str, tuple[QueueView, QueueOwner | None]] = {}
    for info in await queue.queues():
        owner, count = owned.get(info.queue), counts.get(info.queue, QueueCounts())
        about = QueueView(queue=info.queue, paused=info.paused, **msgspec.structs.asdict(count))
        if owner is not None:
            about = msgspec.structs.replace(about, show=owner.name, topic=owner.topic)
        found[info.queue] = (about, owner)
    return found


async def set_paused(queue: Queue, name: str, actor: str, *, paused: bool) -> bool:
    """Whether that changed anything; what runs goes on. In the audit trail under the name of `actor`."""
    infos = await queue.queues([name])
    if infos and infos[0].paused is paused:
        return False
    async with queue.database.transaction() as tx:
        await (queue.pause if paused else queue.resume)(name, on=tx)
        action = "queue.pause" if paused else "queue.resume"
        await audit.append(tx, [AuditEntry(actor, action, f"queue:{name}")])
    return True
