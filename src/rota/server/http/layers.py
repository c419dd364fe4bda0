"""What a job consists of: its layers, their frames that are on workers, and how much of it may run at once."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from uuid import UUID

import msgspec
from litestar import Controller, get, patch
from litestar.params import FromPath, JSONBody

from rota.accounting.admin import Admin
from rota.accounting.items import Change
from rota.engine.frames import on_workers
from rota.engine.jobs import Job, Layer
from rota.model.access import Role
from rota.model.errors import InvalidInput, NotFound
from rota.model.farm import Changed, JobCaps
from rota.model.ids import LayerId
from rota.server.http.pages import LIMIT, Limit, Page
from rota.server.http.routes import AtDesk, needs
from rota.server.http.seen import JobPath, seen
from rota.server.http.wire import Ask


class FrameTold(msgspec.Struct, frozen=True, kw_only=True):
    """A frame that is on a worker."""

    layer: str
    frame: int
    """Its number, as it was submitted."""
    attempt: int
    worker: str
    worker_id: UUID
    since: datetime


class LayerRoutes(Controller):
    path = "/jobs/{job:str}"
    tags = ("layers and frames",)

    @get("/layers", opt=needs(Role.VIEWER, "somewhere"))
    async def find_layers(self, request: Ask, desk: AtDesk, job: JobPath) -> Page[Layer]:
        return Page((await seen(request.user, desk, job)).layers)

    @get("/layers/{layer:str}", opt=needs(Role.VIEWER, "somewhere"))
    async def get_layer(self, request: Ask, desk: AtDesk, job: JobPath, layer: FromPath[str]) -> Layer:
        return _layer(await seen(request.user, desk, job), layer)

    @get("/frames", opt=needs(Role.VIEWER, "somewhere"))
    async def find_frames(self, request: Ask, desk: AtDesk, job: JobPath, limit: Limit = LIMIT) -> Page[FrameTold]:
        """Frames that are on workers, those that are there longest first. What became of others is in the results."""
        found = await seen(request.user, desk, job)
        layers = {layer.id: layer for layer in found.layers}
        return Page(
            [
                FrameTold(
                    layer=layers[one.layer].name,
                    frame=layers[one.layer].frames.number(one.frame),
                    attempt=one.attempt,
                    worker=one.worker,
                    worker_id=one.worker_id,
                    since=one.since,
                )
                for one in await on_workers(desk.queue, found.id, limit)
                if one.layer in layers
            ]
        )

    @patch("/caps", opt=needs(Role.OPERATOR, "somewhere"))
    async def change_job_caps(self, request: Ask, desk: AtDesk, job: JobPath, data: JSONBody[JobCaps]) -> Changed:
        """How much of a job, or of a layer of it, may run at once; -1 takes the cap away."""
        found = await seen(request.user, desk, job, Role.OPERATOR)
        if found.state.terminal:
            raise InvalidInput(f"Job {found.id} has ended: caps are for jobs that wait or run.")
        layer = None if data.layer is None else _layer(found, data.layer).id
        change = await desk.books.change(partial(_set_caps, found, layer, data, request.user.audited))
        return Changed(name=data.layer or found.name, changed=change.before != change.after)


async def _set_caps(job: Job, layer: LayerId | None, caps: JobCaps, who: str, admin: Admin) -> Change:
    cores, gpus = caps.max_cores, caps.max_gpus
    if layer is None:
        return await admin.change_job(job.show, job.id, actor=who, max_cores=cores, max_gpus=gpus)
    return await admin.change_layer(job.show, layer, actor=who, max_cores=cores, max_gpus=gpus)


def _layer(job: Job, name: str) -> Layer:
    for layer in job.layers:
        if layer.name == name:
            return layer
    names = ", ".join(layer.name for layer in job.layers[:20])
    raise NotFound(f"Job {job.id} has no layer {name[:64]!r}: it has {names}.")
