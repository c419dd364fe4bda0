"""Lua scripts as files beside the Python that runs them.

    RELEASE = script(__package__, "release", replies=Released | Absent)

    match await RELEASE(client, sub=keys.sub(show, pool), tokens=keys.tokens(show), token="…"):
        case Released(seq): ...
        case Absent(): ...

The file's header (see `script_contract`) is the contract: calls are checked against it, and replies are decoded into
the structs it names. Scripts are called by digest. After a restart or flush the server does not know the digest and
has run nothing, so sending again is safe: one caller per pool loads the text while the others wait, then all retry. A
server that reports the digest missing right after the load (such as a proxy over several servers) is sent the full
text, with a warning.

A script is atomic. A lost reply leaves its outcome unknown; only the caller can resolve that, so nothing is retried
here. If the loading caller dies or is cancelled, the next waiter loads; if loading fails, every waiter of that attempt
fails with it, instead of retrying one after another.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable
from importlib import resources
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar
from weakref import WeakKeyDictionary

import redis.asyncio
import structlog
from redis.exceptions import NoScriptError, RedisError

from rota.infra import failpoints
from rota.infra.asyncio_cancel import cancellable
from rota.infra.redis.failures import to_rota_error
from rota.infra.redis.script_args import CommandArgument, ScriptArguments
from rota.infra.redis.script_contract import parse_contract, render_lua
from rota.infra.redis.script_reply import ReplyDecoder
from rota.infra.telemetry import metrics
from rota.model.errors import RotaError, ScriptFailed

if TYPE_CHECKING:
    from typing_extensions import TypeForm

log = structlog.get_logger(__name__)

LOADS: Final = metrics.counter(
    "rota_redis_script_loads", "Scripts loaded into Redis, because it did not have them.", labels=("script",)
)
EVALS: Final = metrics.counter(
    "rota_redis_script_evals", "Scripts sent as text, because Redis lost them right after loading.", labels=("script",)
)

R = TypeVar("R")
_ERROR_CODE = re.compile(r"([A-Z][A-Z0-9_]+) (.*)", re.DOTALL)


class Script(Generic[R]):
    """One Lua script with replies of type `R`. Holds no connection, so one object serves every client."""

    def __init__(
        self, text: str, source: str, replies: TypeForm[R], library: Callable[[str], str] | None = None
    ) -> None:
        self.header = parse_contract(text, source)
        self.name = self.header.script
        assert library or not self.header.uses, f"{source} uses a library: pass `library`, which reads it"
        self.text = render_lua(self.header, text, [library(name) for name in self.header.uses] if library else ())
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()
        self._arguments = ScriptArguments(self.header)
        self._replies = ReplyDecoder(self.header, replies)
        self._loads = 0
        self._pools: WeakKeyDictionary[object, _PoolLoadState] = WeakKeyDictionary()

    async def __call__(self, client: redis.asyncio.Redis, /, **parameters: object) -> R:
        arguments = self._arguments.encode(parameters)
        loads = self._loads
        try:
            reply = await _send(client, "EVALSHA", self.sha, arguments)
        except NoScriptError:
            reply = await self._load_and_retry(client, arguments, loads)
        except (RedisError, OSError) as error:
            raise self._to_error(error, client) from error
        return self._replies.decode(reply)

    async def _load_and_retry(
        self, client: redis.asyncio.Redis, arguments: list[CommandArgument], loads: int
    ) -> object:
        try:
            await self._load_once(client, loads)
            return await _send(client, "EVALSHA", self.sha, arguments)
        except NoScriptError:
            return await self._eval_text(client, arguments)
        except (RedisError, OSError) as error:
            raise self._to_error(error, client) from error

    async def _load_once(self, client: redis.asyncio.Redis, loads: int) -> None:
        """Load the text, unless this pool has loaded it since `loads` was read."""
        loading = self._pools.setdefault(client.connection_pool, _PoolLoadState())
        attempt = loading.attempt
        async with loading.lock:
            if loading.done > loads:
                return
            if loading.failure is not None and loading.attempt > attempt:
                raise loading.failure
            await self._load(client, loading)

    async def _load(self, client: redis.asyncio.Redis, loading: _PoolLoadState) -> None:
        loading.failure = None
        try:
            await _send(client, "SCRIPT LOAD", self.text, [])
        except (RedisError, OSError) as error:
            loading.failure = error
            raise
        finally:
            loading.attempt += 1
        failpoints.hit("script.after_load")
        self._loads += 1
        loading.done = self._loads
        LOADS.labels(self.name).inc()
        log.info("redis_script_loaded", script=self.name)

    async def _eval_text(self, client: redis.asyncio.Redis, arguments: list[CommandArgument]) -> object:
        EVALS.labels(self.name).inc()
        log.warning("redis_script_not_cached", script=self.name, remedy="is there a proxy over several servers?")
        try:
            return await _send(client, "EVAL", self.text, arguments)
        except (RedisError, OSError) as error:
            raise self._to_error(error, client) from error

    def _to_error(self, error: Exception, client: redis.asyncio.Redis) -> RotaError:
        translated = to_rota_error(error, client)
        if translated is not None:
            return translated
        match = _ERROR_CODE.match(str(error))
        code, sentence = match.groups() if match else ("ERR", str(error))
        return ScriptFailed(f"The Redis script {self.name} failed: {sentence}", script=self.name, word=code)


class _PoolLoadState:
    """State of loading one script in one pool."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.done = 0
        """The script's load count at this pool's last successful load."""
        self.attempt = 0
        self.failure: Exception | None = None


async def _send(client: redis.asyncio.Redis, command: str, text: str, arguments: list[CommandArgument]) -> Any:
    with cancellable():
        return await client.execute_command(command, text, *arguments)  # type: ignore[no-untyped-call]


def script(package: str, name: str, replies: TypeForm[R]) -> Script[R]:
    """The script in `name`.lua of `package`. Reads and checks it; meant for module-level constants."""

    def read(name: str) -> str:
        return resources.files(package).joinpath(f"{name}.lua").read_text(encoding="utf-8")

    loaded = Script(read(name), f"{package}/{name}.lua", replies, library=read)
    if loaded.name != name:
        raise SyntaxError(
            f"the script is named {loaded.name}, its file {name}.lua", (f"{package}/{name}.lua", 1, 1, "")
        )
    return loaded
