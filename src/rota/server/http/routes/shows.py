"""Shows and their folders, subscriptions and departments. Core counts are in cores, not hundredths."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

from litestar import Controller, delete, get, patch, post
from litestar.params import JSONBody, PathParameter

from rota.accounting.resources import CapsUpdate, QuotaChange, QuotaItem, Show
from rota.accounting.usage import ShowUsage
from rota.api.pages import Page
from rota.api.resources import (
    CapsChange,
    CapsSpec,
    CapsView,
    ChangeResult,
    NamedResource,
    ShowChange,
    ShowQuotaView,
    ShowSpec,
    ShowView,
    SubscriptionChange,
    SubscriptionSpec,
    SubscriptionView,
)
from rota.model.access import Role
from rota.model.errors import InvalidInput
from rota.model.quota import Level
from rota.server.http.codec import ApiRequest
from rota.server.http.dependencies import HttpDependencies
from rota.server.http.permissions import Deps, requires

ShowPath = Annotated[str, PathParameter(max_length=200, description="The name of a show.")]
NamePath = Annotated[str, PathParameter(max_length=200, description="Its name.")]
PoolPath = Annotated[str, PathParameter(max_length=200, description="The name of a pool.")]

VIEW, ADMIN = requires(Role.VIEWER, "show"), requires(Role.ADMIN, "show")


class ShowRoutes(Controller):
    path = "/shows"
    tags = ("shows",)

    @get(opt=requires(Role.VIEWER, "somewhere"))
    async def find_shows(self, request: ApiRequest, deps: Deps) -> Page[ShowView]:
        """List the shows that the key can view."""
        found = await deps.books.admin.shows()
        return Page([show_view(show) for show in found if request.user.has_role(Role.VIEWER, show.id)])

    @post(opt=requires(Role.ADMIN, "everywhere"))
    async def create_show(self, request: ApiRequest, deps: Deps, data: JSONBody[ShowSpec]) -> ShowView:
        """Create a show with the folder default and no subscriptions."""
        who = request.user.audited
        change = await deps.books.change(lambda admin: admin.create_show(data.name, actor=who, managed=data.managed))
        return show_view(_changed_show(change))

    @get("/{show:str}", opt=VIEW)
    async def get_show(self, deps: Deps, show: ShowPath) -> ShowQuotaView:
        """Show subscriptions and caps of a show with their usage."""
        admin, found = deps.books.admin, await deps.books.admin.show(show)
        usage = await ShowUsage.of(deps.books, found)
        return ShowQuotaView(
            show=show_view(found),
            subscriptions=[
                share_view(one) for one in usage.with_usage(Level.SUBSCRIPTION, await admin.subscriptions(show))
            ],
            folders=[caps_view(one) for one in usage.with_usage(Level.FOLDER, await admin.folders(show))],
            departments=[caps_view(one) for one in usage.with_usage(Level.POINT, await admin.points(show))],
            is_old=usage.is_stale,
        )

    @patch("/{show:str}", opt=ADMIN)
    async def change_show(
        self, request: ApiRequest, deps: Deps, show: ShowPath, data: JSONBody[ShowChange]
    ) -> ShowView:
        """Rename a show, let Redis or PostgreSQL keep its accounts, or limit its concurrent jobs: one of these."""
        who = request.user.audited
        match (data.name, data.managed, data.max_jobs):
            case (str() as name, None, None):
                change = await deps.books.change(lambda admin: admin.rename_show(show, name, actor=who))
            case (None, bool() as managed, None):
                change = await deps.books.change(lambda admin: admin.set_managed(show, managed, actor=who))
            case (None, None, int() as most):
                change = await deps.books.change(lambda admin: admin.change_show(show, max_jobs=most, actor=who))
            case _:
                raise InvalidInput(
                    "A show changes one property at a time: send exactly one of name, managed and max_jobs."
                )
        return show_view(_changed_show(change))

    @delete("/{show:str}", opt=ADMIN, status_code=200)
    async def delete_show(self, request: ApiRequest, deps: Deps, show: ShowPath) -> ChangeResult:
        """Delete a show without jobs."""
        await deps.books.change(lambda admin: admin.delete_show(show, actor=request.user.audited))
        return ChangeResult(name=show, changed=True)

    @get("/{show:str}/subscriptions", opt=VIEW)
    async def find_subscriptions(self, deps: Deps, show: ShowPath) -> Page[SubscriptionView]:
        usage = await ShowUsage.of(deps.books, await deps.books.admin.show(show))
        found = usage.with_usage(Level.SUBSCRIPTION, await deps.books.admin.subscriptions(show))
        return Page([share_view(one) for one in found])

    @post("/{show:str}/subscriptions", opt=requires(Role.ADMIN, "everywhere"))
    async def create_subscription(
        self, request: ApiRequest, deps: Deps, show: ShowPath, data: JSONBody[SubscriptionSpec]
    ) -> SubscriptionView:
        """Subscribe a show to a pool. All shows share pools, so this needs admin in every show."""
        who = request.user.audited
        change = await deps.books.change(
            lambda admin: admin.create_subscription(
                show, data.pool, actor=who, size=data.size, burst=data.burst, gpu_burst=data.gpu_burst
            )
        )
        return share_view(_changed_item(change))

    @patch("/{show:str}/subscriptions/{pool:str}", opt=requires(Role.ADMIN, "everywhere"))
    async def change_subscription(
        self, request: ApiRequest, deps: Deps, show: ShowPath, pool: PoolPath, data: JSONBody[SubscriptionChange]
    ) -> SubscriptionView:
        who = request.user.audited
        change = await deps.books.change(
            lambda admin: admin.change_subscription(
                show, pool, actor=who, size=data.size, burst=data.burst, gpu_burst=data.gpu_burst
            )
        )
        return share_view(_changed_item(change))

    @delete("/{show:str}/subscriptions/{pool:str}", opt=requires(Role.ADMIN, "everywhere"), status_code=200)
    async def delete_subscription(
        self, request: ApiRequest, deps: Deps, show: ShowPath, pool: PoolPath
    ) -> ChangeResult:
        await deps.books.change(lambda admin: admin.delete_subscription(show, pool, actor=request.user.audited))
        return ChangeResult(name=pool, changed=True)

    @get("/{show:str}/folders", opt=VIEW)
    async def find_folders(self, deps: Deps, show: ShowPath) -> Page[CapsView]:
        return await _caps_page(deps, show, Level.FOLDER, deps.books.admin.folders)

    @post("/{show:str}/folders", opt=ADMIN)
    async def create_folder(
        self, request: ApiRequest, deps: Deps, show: ShowPath, data: JSONBody[CapsSpec]
    ) -> CapsView:
        who, caps = request.user.audited, _caps(data)
        change = await deps.books.change(lambda admin: admin.create_folder(show, data.name, actor=who, caps=caps))
        return caps_view(_changed_item(change))

    @patch("/{show:str}/folders/{folder:str}", opt=ADMIN)
    async def change_folder(
        self, request: ApiRequest, deps: Deps, show: ShowPath, folder: NamePath, data: JSONBody[CapsChange]
    ) -> CapsView:
        who, caps = request.user.audited, _caps(data)
        return caps_view(
            _changed_item(await deps.books.change(lambda admin: admin.change_folder(show, folder, caps, actor=who)))
        )

    @post("/{show:str}/folders/{folder:str}/rename", opt=ADMIN, status_code=200)
    async def rename_folder(
        self, request: ApiRequest, deps: Deps, show: ShowPath, folder: NamePath, data: JSONBody[NamedResource]
    ) -> CapsView:
        who = request.user.audited
        change = await deps.books.change(lambda admin: admin.rename_folder(show, folder, data.name, actor=who))
        return caps_view(_changed_item(change))

    @delete("/{show:str}/folders/{folder:str}", opt=ADMIN, status_code=200)
    async def delete_folder(self, request: ApiRequest, deps: Deps, show: ShowPath, folder: NamePath) -> ChangeResult:
        await deps.books.change(lambda admin: admin.delete_folder(show, folder, actor=request.user.audited))
        return ChangeResult(name=folder, changed=True)

    @get("/{show:str}/departments", opt=VIEW)
    async def find_departments_of_show(self, deps: Deps, show: ShowPath) -> Page[CapsView]:
        return await _caps_page(deps, show, Level.POINT, deps.books.admin.points)

    @post("/{show:str}/departments", opt=ADMIN)
    async def add_department(
        self, request: ApiRequest, deps: Deps, show: ShowPath, data: JSONBody[CapsSpec]
    ) -> CapsView:
        """Set caps for an existing department in this show."""
        who, caps = request.user.audited, _caps(data)
        change = await deps.books.change(lambda admin: admin.create_point(show, data.name, actor=who, caps=caps))
        return caps_view(_changed_item(change))

    @patch("/{show:str}/departments/{dept:str}", opt=ADMIN)
    async def change_department(
        self, request: ApiRequest, deps: Deps, show: ShowPath, dept: NamePath, data: JSONBody[CapsChange]
    ) -> CapsView:
        who, caps = request.user.audited, _caps(data)
        return caps_view(
            _changed_item(await deps.books.change(lambda admin: admin.change_point(show, dept, caps, actor=who)))
        )

    @delete("/{show:str}/departments/{dept:str}", opt=ADMIN, status_code=200)
    async def remove_department(self, request: ApiRequest, deps: Deps, show: ShowPath, dept: NamePath) -> ChangeResult:
        await deps.books.change(lambda admin: admin.delete_point(show, dept, actor=request.user.audited))
        return ChangeResult(name=dept, changed=True)


class DepartmentRoutes(Controller):
    path = "/departments"
    tags = ("departments",)

    @get(opt=requires(Role.VIEWER, "somewhere"))
    async def find_departments(self, deps: Deps) -> Page[NamedResource]:
        return Page([NamedResource(name=one.name) for one in await deps.books.admin.depts()])

    @post(opt=requires(Role.ADMIN, "everywhere"))
    async def create_department(self, request: ApiRequest, deps: Deps, data: JSONBody[NamedResource]) -> NamedResource:
        await deps.books.change(lambda admin: admin.create_dept(data.name, actor=request.user.audited))
        return data

    @post("/{dept:str}/rename", opt=requires(Role.ADMIN, "everywhere"), status_code=200)
    async def rename_department(
        self, request: ApiRequest, deps: Deps, dept: NamePath, data: JSONBody[NamedResource]
    ) -> NamedResource:
        await deps.books.change(lambda admin: admin.rename_dept(dept, data.name, actor=request.user.audited))
        return data

    @delete("/{dept:str}", opt=requires(Role.ADMIN, "everywhere"), status_code=200)
    async def delete_department(self, request: ApiRequest, deps: Deps, dept: NamePath) -> ChangeResult:
        await deps.books.change(lambda admin: admin.delete_dept(dept, actor=request.user.audited))
        return ChangeResult(name=dept, changed=True)


def show_view(show: Show) -> ShowView:
    return ShowView(id=show.id, name=show.name, managed=show.managed, max_jobs=show.max_jobs)


def share_view(item: QuotaItem) -> SubscriptionView:
    return SubscriptionView(
        pool=item.name,
        size=_cores(item.limits["int_size"]),
        burst=_cores(item.limits["int_burst"]),
        gpu_burst=item.limits["int_gpu_burst"],
        used_cores=_cores(item.usage.cores),
        used_gpus=item.usage.gpus,
    )


def caps_view(item: QuotaItem) -> CapsView:
    return CapsView(
        name=item.name,
        min_cores=_cores(item.limits["int_min_cores"]),
        max_cores=_cores(item.limits["int_max_cores"]),
        min_gpus=item.limits["int_min_gpus"],
        max_gpus=item.limits["int_max_gpus"],
        used_cores=_cores(item.usage.cores),
        used_gpus=item.usage.gpus,
    )


async def _caps_page(
    deps: HttpDependencies, show: str, level: Level, read: Callable[[str], Awaitable[Sequence[QuotaItem]]]
) -> Page[CapsView]:
    usage = await ShowUsage.of(deps.books, await deps.books.admin.show(show))
    return Page([caps_view(one) for one in usage.with_usage(level, await read(show))])


def _caps(spec: CapsSpec | CapsChange) -> CapsUpdate:
    return CapsUpdate(
        min_cores=spec.min_cores, max_cores=spec.max_cores, min_gpus=spec.min_gpus, max_gpus=spec.max_gpus
    )


def _cores(hundredths: int) -> float:
    return hundredths / 100 if hundredths >= 0 else -1


def _changed_show(change: QuotaChange) -> Show:
    assert isinstance(change.after, Show), "a change of a show returns a show"
    return change.after


def _changed_item(change: QuotaChange) -> QuotaItem:
    assert isinstance(change.after, QuotaItem), "a change of limits returns an item"
    return change.after
