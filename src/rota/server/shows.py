"""`ShowInterface`, as `show.proto` has it: who keeps the books of a show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rota.accounting import resources
from rota.accounting.service import AccountingService
from rota.infra.rpc.calls import RpcMethod
from rota.infra.rpc.protobuf import ProtobufMessage
from rota.model.errors import InvalidInput


class GetShowRequest(ProtobufMessage, frozen=True):
    show: str = ""


class SetSchedulerManagedRequest(ProtobufMessage, frozen=True):
    show: str = ""
    enabled: bool | None = None


class ShowReply(ProtobufMessage, frozen=True):
    id: str = ""
    name: str = ""
    scheduler_managed: bool = False
    fence: int = 0


class ShowInterface:
    """Answers calls with what the books say."""

    name = "rota.v1.ShowInterface"

    def __init__(self, books: AccountingService) -> None:
        self._books = books

    def methods(self) -> Mapping[str, RpcMethod[Any]]:
        return {
            "GetShow": RpcMethod(GetShowRequest, self.get_show),
            "SetSchedulerManaged": RpcMethod(SetSchedulerManagedRequest, self.set_scheduler_managed),
        }

    async def get_show(self, request: GetShowRequest, _caller: str) -> ShowReply:
        return _to_reply(await self._find_show(request.show))

    async def set_scheduler_managed(self, request: SetSchedulerManagedRequest, caller: str) -> ShowReply:
        """A request that does not say which way is refused: the default of the wire format would be a decision."""
        managed = request.enabled
        if managed is None:
            raise InvalidInput("The request does not say who is to keep the books: set `enabled` to true or false.")
        show = await self._find_show(request.show)
        await self._books.change(lambda admin: admin.set_managed(show.name, managed, actor=caller))
        return _to_reply(await self._find_show(str(show.id)))  # seeding has moved its fence since

    async def _find_show(self, show: str) -> resources.Show:
        """By name, or else by id."""
        shows = await self._books.admin.shows()
        by_name = {found.name: found for found in shows}
        found = by_name.get(show) or {str(found.id): found for found in shows}.get(show.lower())
        if found is None:
            raise resources.unknown_name_error("show", show, by_name)
        return found


def _to_reply(show: resources.Show) -> ShowReply:
    return ShowReply(str(show.id), show.name, show.managed, show.fence)
