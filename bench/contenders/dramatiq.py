"""Dramatiq by Redis: one worker process with eight threads, its default middleware."""

from __future__ import annotations

import time
from typing import Any

import dramatiq  # type: ignore[import-not-found]
from dramatiq.brokers.redis import RedisBroker  # type: ignore[import-not-found]

from bench.contenders.brokered import broker_url, drain_s
from bench.contenders.marks import mark
from bench.contenders.serve import Body, serve

THREADS = 8


def made_actor(url: str) -> Any:
    broker = RedisBroker(url=url)
    dramatiq.set_broker(broker)
    return dramatiq.actor(broker=broker, actor_name="noop")(_noop)


def _noop(frame: int, scene: str) -> None:  # noqa: ARG001
    mark(frame)


class Dramatiq:
    async def prepare(self, url: str) -> None:
        RedisBroker(url=url).client.flushdb()

    async def fill(self, url: str, bodies: list[Body]) -> float:
        """One by one: it has nothing for many."""
        send = made_actor(url).send
        began = time.perf_counter()
        for body in bodies:
            send(**body)
        return time.perf_counter() - began

    async def drain(self, url: str, n: int) -> float:
        return drain_s(url, n, "dramatiq", "bench.contenders.dramatiq", "-p", "1", "-t", str(THREADS))


if __name__ == "__main__":
    serve(Dramatiq())
else:
    noop = made_actor(broker_url())
