"""Base of API resources such as `app.shows`, written once for async and sync callers.

`app.shows` is a `ShowsResource[AsyncMode]`, whose methods are awaited. `app.sync.shows` is a `ShowsResource[SyncMode]`:
the same methods block while they run on the background loop. Type checkers know the return type of both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Mapping
from functools import update_wrapper, wraps
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, ParamSpec, TypeVar, cast, overload
from urllib.parse import quote

from msgspec import UNSET

from rota.api.pages import Page
from rota.sdk.background_loop import run_blocking

if TYPE_CHECKING:
    from rota.client.http import HttpClient
    from rota.sdk.app import Rota

P = ParamSpec("P")
T = TypeVar("T")


class AsyncMode:
    """Resource methods return coroutines."""


class SyncMode:
    """Resource methods block."""


M = TypeVar("M", AsyncMode, SyncMode)
PAGE_SIZE: Final = 1000
UNPAGED: Final = sys.maxsize
"""The list has no pages."""


def http_client_of(app: Rota) -> HttpClient:
    """The HTTP client of an app, or its in-memory replacement in tests."""
    client: HttpClient = app.transport.http
    return client


class ApiResource(Generic[M]):
    def __init__(self, app: Rota, mode: type[M]) -> None:
        self._app = app
        self._is_sync = mode is SyncMode

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lower()} of {self._app!r}>"

    async def _request(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        idempotent: bool = True,
        query: Mapping[str, object] | None = None,
        body: object = UNSET,
    ) -> T:
        """`idempotent`: the request may be repeated after a failure."""
        return await http_client_of(self._app).call(method, path, kind, idempotent=idempotent, query=query, body=body)

    async def _list(self, path: str, kind: type[T], /, *, most: int = UNPAGED, **query: object) -> list[T]:
        """Reads pages until `most` items."""
        pages = cast("type[Page[T]]", Page[kind])  # type: ignore[valid-type]
        items: list[T] = []
        after: str | None = None
        while len(items) < most:
            paged = {"after": after, "limit": min(PAGE_SIZE, most - len(items))} if most is not UNPAGED else {}
            page = await self._request("GET", path, pages, query={**query, **paged})
            items += page.items
            if (after := page.next) is None:
                break
        return items


class api_method(Generic[P, T]):
    """Descriptor of an async resource method: awaited in AsyncMode, blocking in SyncMode."""

    def __init__(self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> None:
        self.method = method
        update_wrapper(cast("Callable[..., Any]", self), method)

    @overload
    def __get__(self, resource: None, kind: type[Any]) -> api_method[P, T]: ...

    @overload
    def __get__(self, resource: ApiResource[AsyncMode], kind: type[Any]) -> Callable[P, Coroutine[Any, Any, T]]: ...

    @overload
    def __get__(self, resource: ApiResource[SyncMode], kind: type[Any]) -> Callable[P, T]: ...

    def __get__(self, resource: ApiResource[Any] | None, kind: type[Any]) -> Any:
        if resource is None:
            return self
        bound = self.method.__get__(resource, kind)
        if not resource._is_sync:  # noqa: SLF001 - same module
            return bound

        @wraps(self.method)
        def blocking(*args: P.args, **kwargs: P.kwargs) -> T:
            coroutine: Coroutine[Any, Any, T] = bound(*args, **kwargs)
            return run_blocking(coroutine)

        return blocking


def url_path(*names: str) -> str:
    """Joins names to a path, percent-encoded."""
    return "".join(f"/{quote(name, safe='')}" for name in names)
