"""Parts of the API that an app hands out, such as `app.shows`, written once for those who await and those who wait.

`app.shows` is a `Shows[Awaits]`, and its calls are awaited; `app.sync.shows` is a `Shows[Waits]`: the same calls run on
the background loop while their callers wait. Which of the two a call returns is known to a type checker.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Mapping
from functools import update_wrapper, wraps
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, ParamSpec, TypeVar, cast, overload
from urllib.parse import quote

from msgspec import UNSET

from rota.client.pagination import ApiPage
from rota.sdk.background_loop import run_blocking

if TYPE_CHECKING:
    from rota.client.http import HttpClient
    from rota.sdk.app import Rota

P = ParamSpec("P")
T = TypeVar("T")


class AsyncMode:
    """Of rooms whose calls are awaited."""


class SyncMode:
    """Of rooms whose calls return when they are done."""


M = TypeVar("M", AsyncMode, SyncMode)
PAGE_SIZE: Final = 1000
UNPAGED: Final = sys.maxsize
"""Of lists that come whole."""


def http_client_of(app: Rota) -> HttpClient:
    """The connections of an app, or what a rehearsal plays of them."""
    wire: HttpClient = app.transport.wire
    return wire


class ApiResource(Generic[M]):
    def __init__(self, app: Rota, mode: type[M]) -> None:
        self._app = app
        self._waits = mode is SyncMode

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lower()} of {self._app!r}>"

    async def _request(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        again: bool = True,
        query: Mapping[str, object] | None = None,
        body: object = UNSET,
    ) -> T:
        """`again`: asking twice does what asking once does."""
        return await http_client_of(self._app).call(method, path, kind, again=again, query=query, body=body)

    async def _list(self, path: str, kind: type[T], /, *, most: int = UNPAGED, **query: object) -> list[T]:
        """Page by page."""
        pages = cast("type[ApiPage[T]]", ApiPage[kind])  # type: ignore[valid-type]
        found: list[T] = []
        after: str | None = None
        while len(found) < most:
            paged = {"after": after, "limit": min(PAGE_SIZE, most - len(found))} if most is not UNPAGED else {}
            page = await self._request("GET", path, pages, query={**query, **paged})
            found += page.items
            if (after := page.next) is None:
                break
        return found


class api_method(Generic[P, T]):
    """Of an async method of a room."""

    def __init__(self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> None:
        self.method = method
        update_wrapper(cast("Callable[..., Any]", self), method)

    @overload
    def __get__(self, room: None, kind: type[Any]) -> api_method[P, T]: ...

    @overload
    def __get__(self, room: ApiResource[AsyncMode], kind: type[Any]) -> Callable[P, Coroutine[Any, Any, T]]: ...

    @overload
    def __get__(self, room: ApiResource[SyncMode], kind: type[Any]) -> Callable[P, T]: ...

    def __get__(self, room: ApiResource[Any] | None, kind: type[Any]) -> Any:
        if room is None:
            return self
        bound = self.method.__get__(room, kind)
        if not room._waits:  # noqa: SLF001 - of our own
            return bound

        @wraps(self.method)
        def waiting(*args: P.args, **kwargs: P.kwargs) -> T:
            coroutine: Coroutine[Any, Any, T] = bound(*args, **kwargs)
            return run_blocking(coroutine)

        return waiting


def url_path(*names: str) -> str:
    """A path of these names, whatever they hold."""
    return "".join(f"/{quote(name, safe='')}" for name in names)
