"""The Redis client shared by all packages, and the check that its server suits accounting.

Settings that deliberately differ from redis-py's defaults:

* A pool that blocks callers for a bounded time, instead of failing immediately when exhausted.
* No retries. redis-py repeats a failed command up to ten times, even when only the reply was lost; a booking script
  would book twice. The pool itself replaces connections that died while idle, so a server restart fails only the
  commands in flight.
* RESP2: a reply always answers the preceding command. RESP3 would add push messages, a HELLO per connection and the
  maintenance notices of a hosted product.
* Replies as bytes, because keys and tokens need not be text.
* `CLIENT SETINFO` as in redis-py, in one packet with SELECT and ignored by servers that do not support it: with the
  client's name it identifies the connection in CLIENT LIST.

Options in the URL cannot weaken these: Rota's are applied last.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import msgspec
import redis.asyncio
from redis.asyncio.connection import Connection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.driver_info import DriverInfo
from redis.exceptions import ReadOnlyError

from rota.infra.redis.connection import CONNECTION_CLASSES
from rota.infra.redis.failures import address_of, translate_errors
from rota.infra.redis.target import RedisTarget
from rota.model.errors import EvictingRedis, InvalidSetting, SetupFailed
from rota.model.urls import validate_url

VERSION_MIN = (6, 2)


def connect(target: RedisTarget) -> redis.asyncio.Redis:
    """A client with its own pool. Sends nothing yet; the caller must call `aclose`."""
    try:
        options: dict[str, Any] = {**parse_url(validate_url(target.url)), **_pool_options(target)}
        options["connection_class"] = CONNECTION_CLASSES[options.get("connection_class", Connection)]
        pool = redis.asyncio.BlockingConnectionPool(**options)
        pool.make_connection()  # type: ignore[no-untyped-call]  # no I/O: validates the options
    except (ValueError, TypeError):
        # Not chained: their messages may quote part of the password.
        raise InvalidSetting(
            "The Redis URL cannot be read: write it as redis://user:password@host:port/0, with special characters of"
            " the password percent-encoded."
        ) from None
    return redis.asyncio.Redis.from_pool(pool)


def _pool_options(target: RedisTarget) -> dict[str, Any]:
    return {
        "max_connections": target.pool_size,
        "timeout": target.pool_wait_s,
        "socket_timeout": target.op_timeout_s,
        "socket_connect_timeout": target.connect_timeout_s,
        "client_name": target.client_name,
        "retry": Retry(NoBackoff(), retries=0),
        "retry_on_timeout": False,
        "protocol": 2,
        "decode_responses": False,
        "driver_info": _driver_info(),
    }


@cache
def _driver_info() -> DriverInfo:
    """What connections tell the server of redis-py. Without it each new connection reads the package's metadata."""
    return DriverInfo()


class PoolUse(msgspec.Struct, frozen=True):
    """Connection pool usage of a client."""

    active: int
    idle: int
    waiters: int
    """Callers waiting for a connection."""


def pool_use(client: redis.asyncio.Redis) -> PoolUse:
    # redis-py has no public API for this. If its attribute names change, these counts become zero.
    pool = client.connection_pool
    active, idle = getattr(pool, "_in_use_connections", ()), getattr(pool, "_available_connections", ())
    waiters = getattr(getattr(pool, "_condition", None), "_waiters", ())
    return PoolUse(len(active), len(idle), len(waiters))


async def health(client: redis.asyncio.Redis) -> float:
    """Duration of one round trip in seconds; raises unless the server accepts writes."""
    started = time.perf_counter()
    with translate_errors(client):
        replication = await client.info("replication")
        if replication["role"] != "master":
            await client.connection_pool.disconnect(inuse_connections=False)
            raise ReadOnlyError
    return time.perf_counter() - started


async def check_server(client: redis.asyncio.Redis) -> None:
    """Reject a server that is too old or may evict keys; read-only."""
    with translate_errors(client):
        server = await client.info("server")
        memory = await client.info("memory")
    address = address_of(client)
    version = str(server["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < VERSION_MIN:
        raise SetupFailed(
            f"Redis at {address} is version {version}: Rota needs Redis 6.2 or newer, or any Valkey.",
            address=address,
            version=version,
        )
    policy = str(memory["maxmemory_policy"])
    if policy != "noeviction":
        raise EvictingRedis(
            f"Redis at {address} may evict keys when it is full (maxmemory-policy {policy}): set it to noeviction.",
            address=address,
            policy=policy,
        )
