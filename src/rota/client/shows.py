"""Shows and what they may use: `app.shows`, `app.folders`, `app.subscriptions`, `app.departments`. Cores in cores."""

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
    """Of all frames of a folder or department together; a maximum of -1 is none."""

    min_cores: Cores
    max_cores: Cores
    min_gpus: int
    max_gpus: int


class ShowsResource(ApiResource[M]):
    @api_method
    async def list(self) -> Sequence[ShowView]:
        """Those that the key may look into."""
        return await self._list("/shows", ShowView)

    @api_method
    async def get(self, name: str) -> ShowQuotaView:
        """With its shares and caps, and what is used of each."""
        return await self._request("GET", url_path("shows", name), ShowQuotaView)

    @api_method
    async def create(self, name: str, *, managed: bool = False) -> ShowView:
        return await self._request("POST", "/shows", ShowView, again=False, body=ShowSpec(name=name, managed=managed))

    @api_method
    async def rename(self, name: str, new: str) -> ShowView:
        return await self._request("PATCH", url_path("shows", name), ShowView, again=False, body=ShowChange(name=new))

    @api_method
    async def set_managed(self, name: str, managed: bool) -> ShowView:
        """Let Redis keep its books, or PostgreSQL alone."""
        return await self._request("PATCH", url_path("shows", name), ShowView, body=ShowChange(managed=managed))

    @api_method
    async def set_max_jobs(self, name: str, most: int) -> ShowView:
        """How many jobs of it may run at once; -1 is as many as there are."""
        return await self._request("PATCH", url_path("shows", name), ShowView, body=ShowChange(max_jobs=most))

    @api_method
    async def delete(self, name: str) -> None:
        await self._request("DELETE", url_path("shows", name), ChangeResult, again=False)


class FoldersResource(ApiResource[M]):
    @api_method
    async def list(self, show: str) -> Sequence[CapsView]:
        return await self._list(url_path("shows", show, "folders"), CapsView)

    @api_method
    async def create(self, show: str, name: str, **caps: Unpack[CapOptions]) -> CapsView:
        spec = CapsSpec(name=name, **caps)
        return await self._request("POST", url_path("shows", show, "folders"), CapsView, again=False, body=spec)

    @api_method
    async def change(self, show: str, name: str, **caps: Unpack[CapOptions]) -> CapsView:
        """What is left out stays as it is; a maximum of -1 is none."""
        return await self._request("PATCH", url_path("shows", show, "folders", name), CapsView, body=CapsChange(**caps))

    @api_method
    async def rename(self, show: str, name: str, new: str) -> CapsView:
        path = url_path("shows", show, "folders", name, "rename")
        return await self._request("POST", path, CapsView, again=False, body=NamedResource(name=new))

    @api_method
    async def delete(self, show: str, name: str) -> None:
        await self._request("DELETE", url_path("shows", show, "folders", name), ChangeResult, again=False)


class SubscriptionsResource(ApiResource[M]):
    """A show's shares of pools."""

    @api_method
    async def list(self, show: str) -> Sequence[SubscriptionView]:
        return await self._list(url_path("shows", show, "subscriptions"), SubscriptionView)

    @api_method
    async def create(self, show: str, pool: str, *, size: Cores, burst: Cores, gpu_burst: int = -1) -> SubscriptionView:
        spec = SubscriptionSpec(pool=pool, size=size, burst=burst, gpu_burst=gpu_burst)
        return await self._request(
            "POST", url_path("shows", show, "subscriptions"), SubscriptionView, again=False, body=spec
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
        """What is left out stays as it is."""
        change = SubscriptionChange(size=size, burst=burst, gpu_burst=gpu_burst)
        return await self._request(
            "PATCH", url_path("shows", show, "subscriptions", pool), SubscriptionView, body=change
        )

    @api_method
    async def delete(self, show: str, pool: str) -> None:
        await self._request("DELETE", url_path("shows", show, "subscriptions", pool), ChangeResult, again=False)


class DepartmentsResource(ApiResource[M]):
    """Those there are, and in which shows they have caps."""

    @api_method
    async def list(self) -> Sequence[str]:
        return [one.name for one in await self._list("/departments", NamedResource)]

    @api_method
    async def create(self, name: str) -> None:
        await self._request("POST", "/departments", NamedResource, again=False, body=NamedResource(name=name))

    @api_method
    async def rename(self, name: str, new: str) -> None:
        await self._request(
            "POST", url_path("departments", name, "rename"), NamedResource, again=False, body=NamedResource(name=new)
        )

    @api_method
    async def delete(self, name: str) -> None:
        await self._request("DELETE", url_path("departments", name), ChangeResult, again=False)

    @api_method
    async def of(self, show: str) -> Sequence[CapsView]:
        return await self._list(url_path("shows", show, "departments"), CapsView)

    @api_method
    async def add(self, show: str, name: str, **caps: Unpack[CapOptions]) -> CapsView:
        """Give it caps in this show."""
        spec = CapsSpec(name=name, **caps)
        return await self._request("POST", url_path("shows", show, "departments"), CapsView, again=False, body=spec)

    @api_method
    async def change(self, show: str, name: str, **caps: Unpack[CapOptions]) -> CapsView:
        """What is left out stays as it is; a maximum of -1 is none."""
        return await self._request(
            "PATCH", url_path("shows", show, "departments", name), CapsView, body=CapsChange(**caps)
        )

    @api_method
    async def remove(self, show: str, name: str) -> None:
        await self._request("DELETE", url_path("shows", show, "departments", name), ChangeResult, again=False)
