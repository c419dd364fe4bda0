"""Shows and what they may use: `app.shows`, `app.folders`, `app.subscriptions`, `app.departments`. Cores in cores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack

from rota.model.farm import (
    Capped,
    CapsChange,
    CapsSpec,
    Changed,
    Cores,
    Named,
    Share,
    ShareChange,
    ShareSpec,
    ShowChange,
    ShowInfo,
    ShowSpec,
    ShowTold,
)
from rota.sdk.rooms import M, Room, at, call


class CapsGiven(TypedDict, total=False):
    """Of all frames of a folder or department together; a maximum of -1 is none."""

    min_cores: Cores
    max_cores: Cores
    min_gpus: int
    max_gpus: int


class Shows(Room[M]):
    @call
    async def list(self) -> Sequence[ShowTold]:
        """Those that the key may look into."""
        return await self._list("/shows", ShowTold)

    @call
    async def get(self, name: str) -> ShowInfo:
        """With its shares and caps, and what is used of each."""
        return await self._ask("GET", at("shows", name), ShowInfo)

    @call
    async def create(self, name: str, *, managed: bool = False) -> ShowTold:
        return await self._ask("POST", "/shows", ShowTold, again=False, body=ShowSpec(name=name, managed=managed))

    @call
    async def rename(self, name: str, new: str) -> ShowTold:
        return await self._ask("PATCH", at("shows", name), ShowTold, again=False, body=ShowChange(name=new))

    @call
    async def set_managed(self, name: str, managed: bool) -> ShowTold:
        """Let Redis keep its books, or PostgreSQL alone."""
        return await self._ask("PATCH", at("shows", name), ShowTold, body=ShowChange(managed=managed))

    @call
    async def set_max_jobs(self, name: str, most: int) -> ShowTold:
        """How many jobs of it may run at once; -1 is as many as there are."""
        return await self._ask("PATCH", at("shows", name), ShowTold, body=ShowChange(max_jobs=most))

    @call
    async def delete(self, name: str) -> None:
        await self._ask("DELETE", at("shows", name), Changed, again=False)


class Folders(Room[M]):
    @call
    async def list(self, show: str) -> Sequence[Capped]:
        return await self._list(at("shows", show, "folders"), Capped)

    @call
    async def create(self, show: str, name: str, **caps: Unpack[CapsGiven]) -> Capped:
        spec = CapsSpec(name=name, **caps)
        return await self._ask("POST", at("shows", show, "folders"), Capped, again=False, body=spec)

    @call
    async def change(self, show: str, name: str, **caps: Unpack[CapsGiven]) -> Capped:
        """What is left out stays as it is; a maximum of -1 is none."""
        return await self._ask("PATCH", at("shows", show, "folders", name), Capped, body=CapsChange(**caps))

    @call
    async def rename(self, show: str, name: str, new: str) -> Capped:
        path = at("shows", show, "folders", name, "rename")
        return await self._ask("POST", path, Capped, again=False, body=Named(name=new))

    @call
    async def delete(self, show: str, name: str) -> None:
        await self._ask("DELETE", at("shows", show, "folders", name), Changed, again=False)


class Subscriptions(Room[M]):
    """A show's shares of pools."""

    @call
    async def list(self, show: str) -> Sequence[Share]:
        return await self._list(at("shows", show, "subscriptions"), Share)

    @call
    async def create(self, show: str, pool: str, *, size: Cores, burst: Cores, gpu_burst: int = -1) -> Share:
        spec = ShareSpec(pool=pool, size=size, burst=burst, gpu_burst=gpu_burst)
        return await self._ask("POST", at("shows", show, "subscriptions"), Share, again=False, body=spec)

    @call
    async def change(
        self,
        show: str,
        pool: str,
        *,
        size: Cores | None = None,
        burst: Cores | None = None,
        gpu_burst: int | None = None,
    ) -> Share:
        """What is left out stays as it is."""
        change = ShareChange(size=size, burst=burst, gpu_burst=gpu_burst)
        return await self._ask("PATCH", at("shows", show, "subscriptions", pool), Share, body=change)

    @call
    async def delete(self, show: str, pool: str) -> None:
        await self._ask("DELETE", at("shows", show, "subscriptions", pool), Changed, again=False)


class Departments(Room[M]):
    """Those there are, and in which shows they have caps."""

    @call
    async def list(self) -> Sequence[str]:
        return [one.name for one in await self._list("/departments", Named)]

    @call
    async def create(self, name: str) -> None:
        await self._ask("POST", "/departments", Named, again=False, body=Named(name=name))

    @call
    async def rename(self, name: str, new: str) -> None:
        await self._ask("POST", at("departments", name, "rename"), Named, again=False, body=Named(name=new))

    @call
    async def delete(self, name: str) -> None:
        await self._ask("DELETE", at("departments", name), Changed, again=False)

    @call
    async def of(self, show: str) -> Sequence[Capped]:
        return await self._list(at("shows", show, "departments"), Capped)

    @call
    async def add(self, show: str, name: str, **caps: Unpack[CapsGiven]) -> Capped:
        """Give it caps in this show."""
        spec = CapsSpec(name=name, **caps)
        return await self._ask("POST", at("shows", show, "departments"), Capped, again=False, body=spec)

    @call
    async def change(self, show: str, name: str, **caps: Unpack[CapsGiven]) -> Capped:
        """What is left out stays as it is; a maximum of -1 is none."""
        return await self._ask("PATCH", at("shows", show, "departments", name), Capped, body=CapsChange(**caps))

    @call
    async def remove(self, show: str, name: str) -> None:
        await self._ask("DELETE", at("shows", show, "departments", name), Changed, again=False)
