"""`ShowInterface`, as `show.proto` has it: who keeps the books of a show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rota.accounting import items
from rota.accounting.books import Books
from rota.infra.rpc.calls import Call
from rota.infra.rpc.protobuf import Message
from rota.model.errors import InvalidInput


class GetShowRequest(Message, frozen=True):
    show: str = ""


class SetSchedulerManagedRequest(Message, frozen=True):
    show: str = ""
    enabled: bool | None = None


class Show(Message, frozen=True):
    id: str = ""
    name: str = ""
    scheduler_managed: bool = False
    fence: int = 0


class ShowInterface:
    """Answers calls with what the books say."""

    name = "rota.v1.ShowInterface"

    def __init__(self, books: Books) -> None:
        self._books = books

    def calls(self) -> Mapping[str, Call[Any]]:
        return {
            "GetShow": Call(GetShowRequest, self.get_show),
            "SetSchedulerManaged": Call(SetSchedulerManagedRequest, self.set_scheduler_managed),
        }

    async def get_show(self, request: GetShowRequest, _caller: str) -> Show:
        return _told(await self._found(request.show))

    async def set_scheduler_managed(self, request: SetSchedulerManagedRequest, caller: str) -> Show:
        """A request that does not say which way is refused: the default of the wire format would be a decision."""
        managed = request.enabled
        if managed is None:
            raise InvalidInput("The request does not say who is to keep the books: set `enabled` to true or false.")
        show = await self._found(request.show)
        await self._books.change(lambda admin: admin.set_managed(show.name, managed, actor=caller))
        return _told(await self._found(str(show.id)))  # seeding has moved its fence since

    async def _found(self, show: str) -> items.Show:
        """By name, or else by id."""
        shows = await self._books.admin.shows()
        by_name = {found.name: found for found in shows}
        found = by_name.get(show) or {str(found.id): found for found in shows}.get(show.lower())
        if found is None:
            raise items.unknown("show", show, by_name)
        return found


def _told(show: items.Show) -> Show:
    return Show(str(show.id), show.name, show.managed, show.fence)
