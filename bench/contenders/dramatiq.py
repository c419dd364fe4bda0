"""Dramatiq by Redis: processes of several threads, its default middleware, and AsyncIO for coroutine functions.

Each process fetches 64 messages ahead, as Celery's do: with its default of two for each thread, two threads run a third
to a quarter as many jobs a second.
"""

from __future__ import annotations

import os
from typing import Any

import dramatiq  # type: ignore[import-not-found]
import redis
from dramatiq.brokers.redis import RedisBroker  # type: ignore[import-not-found]
from dramatiq.middleware import AsyncIO  # type: ignore[import-not-found]

from bench.contenders.bodies import BLOCKING
from bench.contenders.marks import mark
from bench.contenders.serve import Body, fill_one_by_one_s, serve_peer
from bench.contenders.workers import kind_of_worker, url_of_worker

PREFETCH = 64
UNACKNOWLEDGED = "dramatiq:default.msgs"
"""Messages that wait or run: one is removed when it is acknowledged."""


def made_actor(url: str, kind: str) -> Any:
    broker = RedisBroker(url=url)
    if kind == "async":
        broker.add_middleware(AsyncIO())
    dramatiq.set_broker(broker)
    return dramatiq.actor(broker=broker, actor_name="noop")(_async_noop if kind == "async" else _blocking(kind))


async def _async_noop(frame: int, scene: str) -> None:  # noqa: ARG001
    mark(frame)


def _blocking(kind: str) -> Any:
    run = BLOCKING[kind]

    def noop(frame: int, scene: str) -> None:  # noqa: ARG001
        run(frame)

    return noop


class Dramatiq:
    async def prepare(self, url: str) -> None:
        RedisBroker(url=url).client.flushdb()

    async def fill(self, url: str, kind: str, bodies: list[Body]) -> float:
        return fill_one_by_one_s(bodies, made_actor(url, kind).send)

    def commands(self, kind: str, processes: int, each: int) -> list[list[str]]:  # noqa: ARG002
        os.environ["dramatiq_queue_prefetch"] = str(max(PREFETCH, 2 * each))  # noqa: SIM112  its spelling
        return [["dramatiq", "bench.contenders.dramatiq", "-p", str(processes), "-t", str(each)]]

    async def left(self, url: str) -> int:
        with redis.Redis.from_url(url) as client:
            return int(client.hlen(UNACKNOWLEDGED))


if __name__ == "__main__":
    serve_peer(Dramatiq())
else:
    noop = made_actor(url_of_worker(), kind_of_worker())
