"""The client every room shares, and whether its server is fit to keep books.

Each choice differs from redis-py's default on purpose:

* A pool that makes callers wait for a bounded time, instead of one that fails at once when all connections are out.
* No retries. redis-py repeats a failed command up to ten times, also when only its answer was lost; a script that
  books would book twice. The pool itself replaces connections that died while idle, so a restarted server costs
  nothing but the commands that were under way.
* RESP2: an answer is then always the answer to the command before it. RESP3 would add pushed messages, a HELLO per
  connection and the maintenance notices of a hosted product.
* Bytes in answers, because keys and tokens need not be text.
* `CLIENT SETINFO` stays as redis-py has it, in one packet with SELECT and ignored by servers that do not know it:
  together with the client's name it tells an operator in CLIENT LIST who is connected.

Options in the URL cannot loosen these: ours are applied last.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import redis.asyncio
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from rota.infra.redis.failures import address_of, translate_errors
from rota.infra.redis.target import RedisTarget
from rota.model.errors import EvictingRedis, InvalidSetting, SetupFailed
from rota.model.urls import validate_url

VERSION_MIN = (6, 2)


def connect(target: RedisTarget) -> redis.asyncio.Redis:
    """A client with its own pool. Nothing is sent yet; whoever made it calls `aclose`."""
    try:
        pool = redis.asyncio.BlockingConnectionPool(**{**parse_url(validate_url(target.url)), **_pool_options(target)})
        pool.make_connection()  # type: ignore[no-untyped-call]  # no I/O: it only looks at the options
    except (ValueError, TypeError):
        # Their messages may quote a piece of the password, so they are not chained.
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
    }


class PoolUse(msgspec.Struct, frozen=True):
    """How busy the connections of a client are."""

    active: int
    idle: int
    waiters: int
    """Callers that wait for one."""


def pool_use(client: redis.asyncio.Redis) -> PoolUse:
    # redis-py tells none of this. A version that calls it otherwise has zeros here, and nothing worse.
    pool = client.connection_pool
    active, idle = getattr(pool, "_in_use_connections", ()), getattr(pool, "_available_connections", ())
    waiters = getattr(getattr(pool, "_condition", None), "_waiters", ())
    return PoolUse(len(active), len(idle), len(waiters))


async def health(client: redis.asyncio.Redis) -> float:
    """Seconds one PING took."""
    started = time.perf_counter()
    with translate_errors(client):
        await client.ping()
    return time.perf_counter() - started


async def check_server(client: redis.asyncio.Redis) -> None:
    """Refuses a server that is too old or may drop keys; changes nothing on it."""
    with translate_errors(client):
        server = await client.info("server")
        memory = await client.info("memory")
    address = address_of(client)
    version = str(server["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < VERSION_MIN:
        raise SetupFailed(
            f"Redis at {address} is version {version}: Rota needs Redis 6.2, or any Valkey, or newer.",
            address=address,
            version=version,
        )
    policy = str(memory["maxmemory_policy"])
    if policy != "noeviction":
        raise EvictingRedis(
            f"Redis at {address} may drop keys when it is full (maxmemory-policy {policy}): set it to noeviction.",
            address=address,
            policy=policy,
        )
