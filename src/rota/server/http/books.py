"""Shows and what belongs to them: folders, subscriptions, departments. Cores in cores."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

from litestar import Controller, delete, get, patch, post
from litestar.params import JSONBody, PathParameter

from rota.accounting.counting import Counting
from rota.accounting.items import Caps, Change, Item, Show
from rota.model.access import Role
from rota.model.errors import InvalidInput
from rota.model.farm import (
    Capped,
    CapsChange,
    CapsSpec,
    Changed,
    Named,
    Share,
    ShareChange,
    ShareSpec,
    ShowChange,
    ShowInfo,
    ShowSpec,
    ShowTold,
)
from rota.model.quota import Level
from rota.server.http.desk import Desk
from rota.server.http.pages import Page
from rota.server.http.routes import AtDesk, needs
from rota.server.http.wire import Ask

ShowPath = Annotated[str, PathParameter(max_length=200, description="The name of a show.")]
NamePath = Annotated[str, PathParameter(max_length=200, description="Its name.")]
PoolPath = Annotated[str, PathParameter(max_length=200, description="The name of a pool.")]

VIEW, ADMIN = needs(Role.VIEWER, "show"), needs(Role.ADMIN, "show")


class ShowRoutes(Controller):
    path = "/shows"
    tags = ("shows",)

    @get(opt=needs(Role.VIEWER, "somewhere"))
    async def find_shows(self, request: Ask, desk: AtDesk) -> Page[ShowTold]:
        """Shows that the key may look into."""
        found = await desk.books.admin.shows()
        return Page([show_told(show) for show in found if request.user.may(Role.VIEWER, show.id)])

    @post(opt=needs(Role.ADMIN, "everywhere"))
    async def create_show(self, request: Ask, desk: AtDesk, data: JSONBody[ShowSpec]) -> ShowTold:
        """A show with the folder default, and nothing that it may use yet."""
        who = request.user.audited
        change = await desk.books.change(lambda admin: admin.create_show(data.name, actor=who, managed=data.managed))
        return show_told(_show(change))

    @get("/{show:str}", opt=VIEW)
    async def get_show(self, desk: AtDesk, show: ShowPath) -> ShowInfo:
        """A show with its shares and caps, and what is used of each."""
        admin, found = desk.books.admin, await desk.books.admin.show(show)
        counting = await Counting.of(desk.books, found)
        return ShowInfo(
            show=show_told(found),
            subscriptions=[share(one) for one in counting.used(Level.SUBSCRIPTION, await admin.subscriptions(show))],
            folders=[capped(one) for one in counting.used(Level.FOLDER, await admin.folders(show))],
            departments=[capped(one) for one in counting.used(Level.POINT, await admin.points(show))],
            is_old=counting.is_old,
        )

    @patch("/{show:str}", opt=ADMIN)
    async def change_show(self, request: Ask, desk: AtDesk, show: ShowPath, data: JSONBody[ShowChange]) -> ShowTold:
        """Rename it, let Redis or PostgreSQL keep its books, or limit the jobs that run at once: one of these."""
        who = request.user.audited
        match (data.name, data.managed, data.max_jobs):
            case (str() as name, None, None):
                change = await desk.books.change(lambda admin: admin.rename_show(show, name, actor=who))
            case (None, bool() as managed, None):
                change = await desk.books.change(lambda admin: admin.set_managed(show, managed, actor=who))
            case (None, None, int() as most):
                change = await desk.books.change(lambda admin: admin.change_show(show, max_jobs=most, actor=who))
            case _:
                raise InvalidInput("A change of a show is one of name, managed and max_jobs: send exactly one.")
        return show_told(_show(change))

    @delete("/{show:str}", opt=ADMIN, status_code=200)
    async def delete_show(self, request: Ask, desk: AtDesk, show: ShowPath) -> Changed:
        """One without jobs."""
        await desk.books.change(lambda admin: admin.delete_show(show, actor=request.user.audited))
        return Changed(name=show, changed=True)

    @get("/{show:str}/subscriptions", opt=VIEW)
    async def find_subscriptions(self, desk: AtDesk, show: ShowPath) -> Page[Share]:
        counting = await Counting.of(desk.books, await desk.books.admin.show(show))
        found = counting.used(Level.SUBSCRIPTION, await desk.books.admin.subscriptions(show))
        return Page([share(one) for one in found])

    @post("/{show:str}/subscriptions", opt=needs(Role.ADMIN, "everywhere"))
    async def create_subscription(self, request: Ask, desk: AtDesk, show: ShowPath, data: JSONBody[ShareSpec]) -> Share:
        """Give it a share of a pool. Pools are everybody's, so this needs admin in every show."""
        who = request.user.audited
        change = await desk.books.change(
            lambda admin: admin.create_subscription(
                show, data.pool, actor=who, size=data.size, burst=data.burst, gpu_burst=data.gpu_burst
            )
        )
        return share(_item(change))

    @patch("/{show:str}/subscriptions/{pool:str}", opt=needs(Role.ADMIN, "everywhere"))
    async def change_subscription(
        self, request: Ask, desk: AtDesk, show: ShowPath, pool: PoolPath, data: JSONBody[ShareChange]
    ) -> Share:
        who = request.user.audited
        change = await desk.books.change(
            lambda admin: admin.change_subscription(
                show, pool, actor=who, size=data.size, burst=data.burst, gpu_burst=data.gpu_burst
            )
        )
        return share(_item(change))

    @delete("/{show:str}/subscriptions/{pool:str}", opt=needs(Role.ADMIN, "everywhere"), status_code=200)
    async def delete_subscription(self, request: Ask, desk: AtDesk, show: ShowPath, pool: PoolPath) -> Changed:
        await desk.books.change(lambda admin: admin.delete_subscription(show, pool, actor=request.user.audited))
        return Changed(name=pool, changed=True)

    @get("/{show:str}/folders", opt=VIEW)
    async def find_folders(self, desk: AtDesk, show: ShowPath) -> Page[Capped]:
        return await _capped_of(desk, show, Level.FOLDER, desk.books.admin.folders)

    @post("/{show:str}/folders", opt=ADMIN)
    async def create_folder(self, request: Ask, desk: AtDesk, show: ShowPath, data: JSONBody[CapsSpec]) -> Capped:
        who, caps = request.user.audited, _caps(data)
        change = await desk.books.change(lambda admin: admin.create_folder(show, data.name, actor=who, caps=caps))
        return capped(_item(change))

    @patch("/{show:str}/folders/{folder:str}", opt=ADMIN)
    async def change_folder(
        self, request: Ask, desk: AtDesk, show: ShowPath, folder: NamePath, data: JSONBody[CapsChange]
    ) -> Capped:
        who, caps = request.user.audited, _caps(data)
        return capped(_item(await desk.books.change(lambda admin: admin.change_folder(show, folder, caps, actor=who))))

    @post("/{show:str}/folders/{folder:str}/rename", opt=ADMIN, status_code=200)
    async def rename_folder(
        self, request: Ask, desk: AtDesk, show: ShowPath, folder: NamePath, data: JSONBody[Named]
    ) -> Capped:
        who = request.user.audited
        change = await desk.books.change(lambda admin: admin.rename_folder(show, folder, data.name, actor=who))
        return capped(_item(change))

    @delete("/{show:str}/folders/{folder:str}", opt=ADMIN, status_code=200)
    async def delete_folder(self, request: Ask, desk: AtDesk, show: ShowPath, folder: NamePath) -> Changed:
        await desk.books.change(lambda admin: admin.delete_folder(show, folder, actor=request.user.audited))
        return Changed(name=folder, changed=True)

    @get("/{show:str}/departments", opt=VIEW)
    async def find_departments_of_show(self, desk: AtDesk, show: ShowPath) -> Page[Capped]:
        return await _capped_of(desk, show, Level.POINT, desk.books.admin.points)

    @post("/{show:str}/departments", opt=ADMIN)
    async def add_department(self, request: Ask, desk: AtDesk, show: ShowPath, data: JSONBody[CapsSpec]) -> Capped:
        """Give caps in this show to a department that there is."""
        who, caps = request.user.audited, _caps(data)
        change = await desk.books.change(lambda admin: admin.create_point(show, data.name, actor=who, caps=caps))
        return capped(_item(change))

    @patch("/{show:str}/departments/{dept:str}", opt=ADMIN)
    async def change_department(
        self, request: Ask, desk: AtDesk, show: ShowPath, dept: NamePath, data: JSONBody[CapsChange]
    ) -> Capped:
        who, caps = request.user.audited, _caps(data)
        return capped(_item(await desk.books.change(lambda admin: admin.change_point(show, dept, caps, actor=who))))

    @delete("/{show:str}/departments/{dept:str}", opt=ADMIN, status_code=200)
    async def remove_department(self, request: Ask, desk: AtDesk, show: ShowPath, dept: NamePath) -> Changed:
        await desk.books.change(lambda admin: admin.delete_point(show, dept, actor=request.user.audited))
        return Changed(name=dept, changed=True)


class DepartmentRoutes(Controller):
    path = "/departments"
    tags = ("departments",)

    @get(opt=needs(Role.VIEWER, "somewhere"))
    async def find_departments(self, desk: AtDesk) -> Page[Named]:
        return Page([Named(name=one.name) for one in await desk.books.admin.depts()])

    @post(opt=needs(Role.ADMIN, "everywhere"))
    async def create_department(self, request: Ask, desk: AtDesk, data: JSONBody[Named]) -> Named:
        await desk.books.change(lambda admin: admin.create_dept(data.name, actor=request.user.audited))
        return data

    @post("/{dept:str}/rename", opt=needs(Role.ADMIN, "everywhere"), status_code=200)
    async def rename_department(self, request: Ask, desk: AtDesk, dept: NamePath, data: JSONBody[Named]) -> Named:
        await desk.books.change(lambda admin: admin.rename_dept(dept, data.name, actor=request.user.audited))
        return data

    @delete("/{dept:str}", opt=needs(Role.ADMIN, "everywhere"), status_code=200)
    async def delete_department(self, request: Ask, desk: AtDesk, dept: NamePath) -> Changed:
        await desk.books.change(lambda admin: admin.delete_dept(dept, actor=request.user.audited))
        return Changed(name=dept, changed=True)


def show_told(show: Show) -> ShowTold:
    return ShowTold(id=show.id, name=show.name, managed=show.managed, max_jobs=show.max_jobs)


def share(item: Item) -> Share:
    return Share(
        pool=item.name,
        size=_cores(item.limits["int_size"]),
        burst=_cores(item.limits["int_burst"]),
        gpu_burst=item.limits["int_gpu_burst"],
        used_cores=_cores(item.usage.cores),
        used_gpus=item.usage.gpus,
    )


def capped(item: Item) -> Capped:
    return Capped(
        name=item.name,
        min_cores=_cores(item.limits["int_min_cores"]),
        max_cores=_cores(item.limits["int_max_cores"]),
        min_gpus=item.limits["int_min_gpus"],
        max_gpus=item.limits["int_max_gpus"],
        used_cores=_cores(item.usage.cores),
        used_gpus=item.usage.gpus,
    )


async def _capped_of(
    desk: Desk, show: str, level: Level, read: Callable[[str], Awaitable[Sequence[Item]]]
) -> Page[Capped]:
    counting = await Counting.of(desk.books, await desk.books.admin.show(show))
    return Page([capped(one) for one in counting.used(level, await read(show))])


def _caps(given: CapsSpec | CapsChange) -> Caps:
    return Caps(min_cores=given.min_cores, max_cores=given.max_cores, min_gpus=given.min_gpus, max_gpus=given.max_gpus)


def _cores(hundredths: int) -> float:
    return hundredths / 100 if hundredths >= 0 else -1


def _show(change: Change) -> Show:
    assert isinstance(change.after, Show), "a show that is changed stays a show"
    return change.after


def _item(change: Change) -> Item:
    assert isinstance(change.after, Item), "what has limits is an item"
    return change.after
