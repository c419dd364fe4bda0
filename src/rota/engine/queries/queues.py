"""Queues with their owners and exact frame counts; pause and resume."""

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
    """The show and topic of a queue. Queues without an owner were not created by submitting jobs."""

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
        view = QueueView(queue=info.queue, paused=info.paused, **msgspec.structs.asdict(count))
        if owner is not None:
            view = msgspec.structs.replace(view, show=owner.name, topic=owner.topic)
        found[info.queue] = (view, owner)
    return found


async def set_paused(queue: Queue, name: str, actor: str, *, paused: bool) -> bool:
    """Pause or resume a queue, audited as `actor`; False if unchanged. Running frames continue."""
    infos = await queue.queues([name])
    if infos and infos[0].paused is paused:
        return False
    async with queue.database.transaction() as tx:
        await (queue.pause if paused else queue.resume)(name, on=tx)
        action = "queue.pause" if paused else "queue.resume"
        await audit.append(tx, [AuditEntry(actor, action, f"queue:{name}")])
    return True
