"""Celery by Redis: prefork, results ignored, early acknowledgement (its default), 64 prefetched for each process.

It runs plain functions only.
"""

from __future__ import annotations

from typing import Any

import redis
from celery import Celery as App  # type: ignore[import-not-found]

from bench.contenders.bodies import BLOCKING
from bench.contenders.serve import Body, fill_one_by_one_s, serve_peer
from bench.contenders.workers import url_of_worker

QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat")


def made_app(url: str) -> Any:
    made = App("bench", broker=url)
    made.conf.update(
        task_ignore_result=True,
        worker_prefetch_multiplier=64,
        worker_send_task_events=False,
        broker_connection_retry_on_startup=True,
    )
    for kind in BLOCKING:
        made.task(name=kind, ignore_result=True)(_noop(kind))
    return made


def _noop(kind: str) -> Any:
    run = BLOCKING[kind]

    def noop(frame: int, scene: str) -> None:  # noqa: ARG001
        run(frame)

    return noop


class Celery:
    async def prepare(self, url: str) -> None:
        redis.Redis.from_url(url).flushdb()

    async def fill(self, url: str, kind: str, bodies: list[Body]) -> float:
        with made_app(url) as app:
            return fill_one_by_one_s(bodies, app.tasks[kind].delay)

    def commands(self, kind: str, processes: int, each: int) -> list[list[str]]:  # noqa: ARG002
        """One command starts all processes of the pool."""
        app, pool = ("-A", "bench.contenders.celery:app"), ("-P", "prefork", "-c", str(processes * each))
        return [["celery", *app, "worker", "-l", "ERROR", *pool, *QUIET]]

    async def left(self, url: str) -> int:
        with redis.Redis.from_url(url) as client:
            return int(client.llen("celery")) + int(client.hlen("unacked"))


app = made_app(url_of_worker())
if __name__ == "__main__":
    serve_peer(Celery())
