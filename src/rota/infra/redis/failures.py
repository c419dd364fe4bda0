"""Maps failures of redis-py to Rota's errors.

| answer | error | reaction (`rota.model.error_reactions`) |
|---|---|---|
| none, or LOADING, READONLY, OOM, BUSY, MISCONF, NOREPLICAS, CLUSTERDOWN, MASTERDOWN | `RedisUnavailable` | back off |
| a wrong password or right, MOVED, CROSSSLOT | `LoginRefused`, `SetupFailed` | refuse |
| NOSCRIPT | none: `Script` loads the script and repeats the call | none |
| any other: a key of the wrong type, a bug | redis-py's `ResponseError` | handled by the caller, or a bug |

Before Redis 7 an error inside a script is wrapped into one of the script (`ERR Error running script ... -OOM ...`). The
body of `translate_errors` contains only calls of the client.

The fact `outcome` of `RedisUnavailable` says what is known: "not_sent" means that nothing reached the server, so a
retry is safe; "unknown" means that the command may have taken effect. This package never retries: only the caller
knows whether the operation is idempotent.
"""

from __future__ import annotations

import re
from types import TracebackType
from typing import Final

import redis.asyncio
from redis import exceptions

from rota.infra.asyncio_cancel import cancellable
from rota.model.errors import LoginRefused, RedisUnavailable, RotaError, SetupFailed

# redis-py has no classes for these two. If its messages change, the outcome becomes "unknown", which is safe.
_POOL_EXHAUSTED: Final = "No connection available."
_CONNECTING: Final = " connecting to "

_TRANSLATIONS: Final[tuple[tuple[type[Exception], type[RotaError], str], ...]] = (
    (
        exceptions.AuthenticationError,
        LoginRefused,
        "refused the login: check user and password in the Redis URL",
    ),
    (
        exceptions.AuthenticationWrongNumberOfArgsError,
        LoginRefused,
        "does not support user names: remove the user from the Redis URL",
    ),
    (
        exceptions.NoPermissionError,
        LoginRefused,
        "does not let this user run all commands Rota needs: grant them with ACL SETUSER",
    ),
    (
        exceptions.ClusterCrossSlotError,
        SetupFailed,
        "is a cluster, and keys used together are in different slots of it: set a hash tag for Rota's keys",
    ),
    (
        exceptions.MovedError,
        SetupFailed,
        "is a node of a cluster that does not hold Rota's keys: point the Redis URL at the node that does",
    ),
    (
        exceptions.ReadOnlyError,
        RedisUnavailable,
        "is a read-only replica: point the Redis URL at the primary",
    ),
    (
        exceptions.OutOfMemoryError,
        RedisUnavailable,
        "has no memory left: raise its maxmemory",
    ),
    (
        exceptions.BusyLoadingError,
        RedisUnavailable,
        "is still loading its data: wait until it is ready",
    ),
)
_UNREACHABLE_ERRORS = (
    OSError,
    exceptions.AskError,
    exceptions.ClusterDownError,
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.TryAgainError,
)
_BUSY_WORDS = "BUSY|MISCONF|NOREPLICAS|UNKILLABLE"
_WORDS_INSIDE = f"{_BUSY_WORDS}|READONLY|OOM|LOADING|MASTERDOWN|CLUSTERDOWN"
_BUSY = re.compile(
    rf"(?:Command # .* of pipeline caused error: )?(?P<plain>(?:{_BUSY_WORDS}) .*)"
    rf"|(?:ERR )?Error running script .*? -(?P<inside>(?:{_WORDS_INSIDE}) .*)",
    re.DOTALL,
)
"""Answers without a class in redis-py: alone, in a pipeline, or inside a script of a server before Redis 7."""


class translate_errors:
    """`with translate_errors(client): await client.get(key)` raises failures as Rota's errors and lets cancellation
    through (see `asyncio_cancel`).
    """

    __slots__ = ("_cancellable", "_client")

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._cancellable = cancellable()

    def __enter__(self) -> None:
        self._cancellable.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancellable.__exit__(kind, error, trace)
        if isinstance(error, (exceptions.RedisError, OSError)):
            translated = to_rota_error(error, self._client)
            if translated is not None:
                raise translated from error


def to_rota_error(error: Exception, client: redis.asyncio.Redis) -> RotaError | None:
    """The error to raise instead of redis-py's, or None for a regular error reply of the server."""
    address = address_of(client)
    for kind, rota_error, what in _TRANSLATIONS:
        if isinstance(error, kind):
            return rota_error(f"Redis at {address} {what}.", address=address, outcome="unknown")
    text = str(error)
    if text == _POOL_EXHAUSTED:
        size = client.connection_pool.max_connections
        what = f"is busy with all {size} connections of the pool: raise the pool size, or reduce the load"
    elif isinstance(error, _UNREACHABLE_ERRORS):
        what = f"cannot be reached ({cause(error)}): check that it runs and that the Redis URL is right"
    elif match := _BUSY.match(text):
        told = match["plain"] or match["inside"]
        what = f"cannot serve requests now ({told.rstrip('. ')}): see the server's log"
    else:
        return None
    outcome = "not_sent" if text == _POOL_EXHAUSTED or _CONNECTING in text else "unknown"
    return RedisUnavailable(f"Redis at {address} {what}.", address=address, outcome=outcome)


def address_of(client: redis.asyncio.Redis) -> str:
    """Host and port for display; never part of the password, because `connect` validates the URL first."""
    options = client.connection_pool.connection_kwargs
    return str(options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}")


def cause(error: Exception) -> str:
    """A short reason without the server's address, which the message already contains."""
    if isinstance(error, (TimeoutError, exceptions.TimeoutError)):
        return "no answer in time"
    if isinstance(error, exceptions.ResponseError):
        return "its cluster is down or being reconfigured"
    return "no connection" if _CONNECTING in str(error) else "the connection was lost"
