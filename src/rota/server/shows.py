"""The gRPC service `ShowInterface` of `show.proto`: whether Redis or PostgreSQL keeps the accounts of a show."""

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
    """Serves the calls from the accounting service."""

    name = "rota.v1.ShowInterface"

    def __init__(self, accounting: AccountingService) -> None:
        self._accounting = accounting

    def methods(self) -> Mapping[str, RpcMethod[Any]]:
        return {
            "GetShow": RpcMethod(GetShowRequest, self.get_show),
            "SetSchedulerManaged": RpcMethod(SetSchedulerManagedRequest, self.set_scheduler_managed),
        }

    async def get_show(self, request: GetShowRequest, _caller: str) -> ShowReply:
        return _to_reply(await self._find_show(request.show))

    async def set_scheduler_managed(self, request: SetSchedulerManagedRequest, caller: str) -> ShowReply:
        """Requires `enabled` explicitly: protobuf's default of false would otherwise disable management."""
        managed = request.enabled
        if managed is None:
            raise InvalidInput("`enabled` is missing: set it to true (Redis keeps the accounts) or false (PostgreSQL).")
        show = await self._find_show(request.show)
        await self._accounting.change(lambda admin: admin.set_managed(show.name, managed, actor=caller))
        return _to_reply(await self._find_show(str(show.id)))  # reread: seeding increased the fence

    async def _find_show(self, show: str) -> resources.Show:
        """Look it up by name, then by id."""
        shows = await self._accounting.admin.shows()
        by_name = {found.name: found for found in shows}
        found = by_name.get(show) or {str(found.id): found for found in shows}.get(show.lower())
        if found is None:
            raise resources.unknown_name_error("show", show, by_name)
        return found


def _to_reply(show: resources.Show) -> ShowReply:
    return ShowReply(str(show.id), show.name, show.managed, show.fence)
