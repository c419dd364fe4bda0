"""The layers of a job, their frames on workers, and the caps of jobs and layers."""

from __future__ import annotations

from functools import partial

from litestar import Controller, get, patch
from litestar.params import FromPath, JSONBody

from rota.accounting.admin import QuotaAdmin
from rota.accounting.resources import QuotaChange
from rota.api.jobs import JobView, Layer, RunningFrameView
from rota.api.pages import Page
from rota.api.resources import ChangeResult, JobCapsChange
from rota.engine.queries.frames import frames_on_workers
from rota.model.access import Role
from rota.model.errors import InvalidInput, NotFound
from rota.model.ids import LayerId
from rota.server.http.codec import ApiRequest
from rota.server.http.pagination import LIMIT_DEFAULT, Limit
from rota.server.http.permissions import Deps, requires
from rota.server.http.visibility import JobPath, visible_job


class LayerRoutes(Controller):
    path = "/jobs/{job:str}"
    tags = ("layers and frames",)

    @get("/layers", opt=requires(Role.VIEWER, "somewhere"))
    async def find_layers(self, request: ApiRequest, deps: Deps, job: JobPath) -> Page[Layer]:
        return Page((await visible_job(request.user, deps, job)).layers)

    @get("/layers/{layer:str}", opt=requires(Role.VIEWER, "somewhere"))
    async def get_layer(self, request: ApiRequest, deps: Deps, job: JobPath, layer: FromPath[str]) -> Layer:
        return _find_layer(await visible_job(request.user, deps, job), layer)

    @get("/frames", opt=requires(Role.VIEWER, "somewhere"))
    async def find_frames(
        self, request: ApiRequest, deps: Deps, job: JobPath, limit: Limit = LIMIT_DEFAULT
    ) -> Page[RunningFrameView]:
        """List frames on workers, longest running first. Ended frames are in the results."""
        found = await visible_job(request.user, deps, job)
        layers = {layer.id: layer for layer in found.layers}
        return Page(
            [
                RunningFrameView(
                    layer=layers[one.layer].name,
                    frame=layers[one.layer].frames.number(one.frame),
                    attempt=one.attempt,
                    worker=one.worker,
                    worker_id=one.worker_id,
                    since=one.since,
                )
                for one in await frames_on_workers(deps.queue, found.id, limit)
                if one.layer in layers
            ]
        )

    @patch("/caps", opt=requires(Role.OPERATOR, "somewhere"))
    async def change_job_caps(
        self, request: ApiRequest, deps: Deps, job: JobPath, data: JSONBody[JobCapsChange]
    ) -> ChangeResult:
        """Cap the cores and GPUs that a job or one of its layers may use concurrently; -1 removes the cap."""
        found = await visible_job(request.user, deps, job, Role.OPERATOR)
        if found.state.terminal:
            raise InvalidInput(f"Job {found.id} has ended: only waiting and running jobs have caps.")
        layer = None if data.layer is None else _find_layer(found, data.layer).id
        change = await deps.books.change(partial(_set_caps, found, layer, data, request.user.audited))
        return ChangeResult(name=data.layer or found.name, changed=change.before != change.after)


async def _set_caps(
    job: JobView, layer: LayerId | None, caps: JobCapsChange, who: str, admin: QuotaAdmin
) -> QuotaChange:
    cores, gpus = caps.max_cores, caps.max_gpus
    if layer is None:
        return await admin.change_job(job.show, job.id, actor=who, max_cores=cores, max_gpus=gpus)
    return await admin.change_layer(job.show, layer, actor=who, max_cores=cores, max_gpus=gpus)


def _find_layer(job: JobView, name: str) -> Layer:
    for layer in job.layers:
        if layer.name == name:
            return layer
    names = ", ".join(layer.name for layer in job.layers[:20])
    raise NotFound(f"Job {job.id} has no layer {name[:64]!r}: it has {names}.")
