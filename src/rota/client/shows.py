"""Shows and their quota: `app.shows`, `app.folders`, `app.subscriptions`, `app.departments`. Units: whole cores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack

from rota.api.resources import (
    CapsChange,
    CapsSpec,
    CapsView,
    ChangeResult,
    Cores,
    NamedResource,
    ShowChange,
    ShowQuotaView,
    ShowSpec,
    ShowView,
    SubscriptionChange,
    SubscriptionSpec,
    SubscriptionView,
)
from rota.client.resource import ApiResource, M, api_method, url_path


class CapOptions(TypedDict, total=False):
    """Limits on the total of a folder's or department's frames; a maximum of -1: unlimited."""

    min_cores: Cores
    max_cores: Cores
    min_gpus: int
    max_gpus: int


class ShowsResource(ApiResource[M]):
    @api_method
    async def list(self) -> Sequence[ShowView]:
        """Shows the key may read."""
        return await self._list("/shows", ShowView)

    @api_method
    async def get(self, name: str) -> ShowQuotaView:
        """With subscriptions, caps and their usage."""
        return await self._request("GET", url_path("shows", name), ShowQuotaView)

    @api_method
    async def create(self, name: str, *, managed: bool = False) -> ShowView:
        return await self._request(
            "POST", "/shows", ShowView, idempotent=False, body=ShowSpec(name=name, managed=managed)
        )

    @api_method
    async def rename(self, name: str, new: str) -> ShowView:
        return await self._request(
            "PATCH", url_path("shows", name), ShowView, idempotent=False, body=ShowChange(name=new)
        )

    @api_method
    async def set_managed(self, name: str, managed: bool) -> ShowView:
        """True: live accounting in Redis; False: in PostgreSQL only."""
        return await self._request("PATCH", url_path("shows", name), ShowView, body=ShowChange(managed=managed))

    @api_method
    async def set_max_jobs(self, name: str, most: int) -> ShowView:
        """Limits concurrently running jobs; -1: unlimited."""
        return await self._request("PATCH", url_path("shows", name), ShowView, body=ShowChange(max_jobs=most))

    @api_method
    async def delete(self, name: str) -> None:
        await self._request("DELETE", url_path("shows", name), ChangeResult, idempotent=False)


class FoldersResource(ApiResource[M]):
    @api_method
    async def list(self, show: str) -> Sequence[CapsView]:
        return await self._list(url_path("shows", show, "folders"), CapsView)

    @api_method
    async def create(self, show: str, name: str, **caps: Unpack[CapOptions]) -> CapsView:
        spec = CapsSpec(name=name, **caps)
        return await self._request("POST", url_path("shows", show, "folders"), CapsView, idempotent=False, body=spec)

    @api_method
    async def change(self, show: str, name: str, **caps: Unpack[CapOptions]) -> CapsView:
        """Omitted values do not change; a maximum of -1: unlimited."""
        return await self._request("PATCH", url_path("shows", show, "folders", name), CapsView, body=CapsChange(**caps))

    @api_method
    async def rename(self, show: str, name: str, new: str) -> CapsView:
        path = url_path("shows", show, "folders", name, "rename")
        return await self._request("POST", path, CapsView, idempotent=False, body=NamedResource(name=new))

    @api_method
    async def delete(self, show: str, name: str) -> None:
        await self._request("DELETE", url_path("shows", show, "folders", name), ChangeResult, idempotent=False)


class SubscriptionsResource(ApiResource[M]):
    """Shares of a show in pools."""

    @api_method
    async def list(self, show: str) -> Sequence[SubscriptionView]:
        return await self._list(url_path("shows", show, "subscriptions"), SubscriptionView)

    @api_method
    async def create(self, show: str, pool: str, *, size: Cores, burst: Cores, gpu_burst: int = -1) -> SubscriptionView:
        spec = SubscriptionSpec(pool=pool, size=size, burst=burst, gpu_burst=gpu_burst)
        return await self._request(
            "POST", url_path("shows", show, "subscriptions"), SubscriptionView, idempotent=False, body=spec
        )

    @api_method
    async def change(
        self,
        show: str,
        pool: str,
        *,
        size: Cores | None = None,
        burst: Cores | None = None,
        gpu_burst: int | None = None,
    ) -> SubscriptionView:
        """Omitted values do not change."""
        change = SubscriptionChange(size=size, burst=burst, gpu_burst=gpu_burst)
        return await self._request(
            "PATCH", url_path("shows", show, "subscriptions", pool), SubscriptionView, body=change
        )

    @api_method
    async def delete(self, show: str, pool: str) -> None:
        await self._request("DELETE", url_path("shows", show, "subscriptions", pool), ChangeResult, idempotent=False)


class DepartmentsResource(ApiResource[M]):
    """Departments, and their caps in each show."""

    @api_method
    async def list(self) -> Sequence[str]:
        return [department.name for department in await self._list("/departments", NamedResource)]

    @api_method
    async def create(self, name: str) -> None:
        await self._request("POST", "/departments", NamedResource, idempotent=False, body=NamedResource(name=name))

    @api_method
    async def rename(self, name: str, new: str) -> None:
        await self._request(
            "POST",
            url_path("departments", name, "rename"),
            NamedResource,
            idempotent=False,
            body=NamedResource(name=new),
        )

    @api_method
    async def delete(self, name: str) -> None:
        await self._request("DELETE", url_path("departments", name), ChangeResult, idempotent=False)

    @api_method
    async def of(self, show: str) -> Sequence[CapsView]:
        return await self._list(url_path("shows", show, "departments"), CapsView)

    @api_method
    async def add(self, show: str, name: str, **caps: Unpack[CapOptions]) -> CapsView:
        """Adds caps for the department in this show."""
        spec = CapsSpec(name=name, **caps)
        return await self._request(
            "POST", url_path("shows", show, "departments"), CapsView, idempotent=False, body=spec
        )

    @api_method
    async def change(self, show: str, name: str, **caps: Unpack[CapOptions]) -> CapsView:
        """Omitted values do not change; a maximum of -1: unlimited."""
        return await self._request(
            "PATCH", url_path("shows", show, "departments", name), CapsView, body=CapsChange(**caps)
        )

    @api_method
    async def remove(self, show: str, name: str) -> None:
        await self._request("DELETE", url_path("shows", show, "departments", name), ChangeResult, idempotent=False)
