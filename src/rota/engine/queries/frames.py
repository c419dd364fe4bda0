"""Frames that are on workers."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

import msgspec

from rota.infra.postgres import query
from rota.model.ids import JobId, LayerId
from rota.queue import Queue

FRAMES_ON_WORKERS = query(__package__, "frames_on_workers")


class FrameOnWorker(msgspec.Struct, frozen=True, kw_only=True):
    layer: LayerId
    frame: int
    """As the queue numbers it."""
    attempt: int
    worker: str
    worker_id: UUID
    since: datetime


async def frames_on_workers(queue: Queue, job: JobId, most: int) -> list[FrameOnWorker]:
    """Those of a job, the first booked first; one that ends while we look may be left out."""
    rows = {row["token"]: row for row in await queue.database.rows(FRAMES_ON_WORKERS, job, most)}
    turns = await queue.lookup_tokens(rows) if rows else {}
    return [
        FrameOnWorker(
            layer=row["pk_layer"],
            frame=turns[token][0],
            attempt=turns[token][1],
            worker=row["worker"],
            worker_id=row["worker_id"],
            since=row["since"],
        )
        for token, row in rows.items()
        if token in turns
    ]
