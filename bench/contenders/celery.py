"""Celery by Redis: two prefork processes, results ignored, early acknowledgement (its default), 64 prefetched each."""

from __future__ import annotations

import time
from typing import Any

import redis
from celery import Celery as App  # type: ignore[import-not-found]

from bench.contenders.brokered import broker_url, drain_s
from bench.contenders.marks import mark
from bench.contenders.serve import Body, serve

PROCESSES = 2
QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat")


def made_app(url: str) -> Any:
    made = App("bench", broker=url)
    made.conf.update(
        task_ignore_result=True,
        worker_prefetch_multiplier=64,
        worker_send_task_events=False,
        broker_connection_retry_on_startup=True,
    )
    made.task(name="noop", ignore_result=True)(noop)
    return made


def noop(frame: int, scene: str) -> None:  # noqa: ARG001
    mark(frame)


class Celery:
    async def prepare(self, url: str) -> None:
        redis.Redis.from_url(url).flushdb()

    async def fill(self, url: str, bodies: list[Body]) -> float:
        """One by one: it has nothing for many."""
        with made_app(url) as app:
            send = app.tasks["noop"].delay
            began = time.perf_counter()
            for body in bodies:
                send(**body)
            return time.perf_counter() - began

    async def drain(self, url: str, n: int) -> float:
        app, pool = ("-A", "bench.contenders.celery:app"), ("-P", "prefork", "-c", str(PROCESSES))
        return drain_s(url, n, "celery", *app, "worker", "-l", "ERROR", *pool, *QUIET)


app = made_app(broker_url())
if __name__ == "__main__":
    serve(Celery())
