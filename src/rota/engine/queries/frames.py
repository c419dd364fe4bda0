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
    """Its queue number."""
    attempt: int
    worker: str
    worker_id: UUID
    since: datetime


async def frames_on_workers(queue: Queue, job: JobId, most: int) -> list[FrameOnWorker]:
    """Frames of a job, oldest booking first; a frame that ends meanwhile may be missing."""
    rows = {row["token"]: row for row in await queue.database.rows(FRAMES_ON_WORKERS, job, most)}
    positions = await queue.lookup_tokens(rows) if rows else {}
    return [
        FrameOnWorker(
            layer=row["pk_layer"],
            frame=positions[token][0],
            attempt=positions[token][1],
            worker=row["worker"],
            worker_id=row["worker_id"],
            since=row["since"],
        )
        for token, row in rows.items()
        if token in positions
    ]
