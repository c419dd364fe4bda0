"""One recompute as the leading replica runs it, in a process of its own: `bench.accounting.maintenance` says when.

    {"postgres_url": …, "redis_url": …, "show": …}     on standard input, once
    (an empty line)                                     recompute now; the answer is a line of JSON, a `Recompute`

Times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Final, Self

import msgspec

from bench.accounting.cluster import Servers, opened
from rota.accounting.live import reconcile
from rota.infra.telemetry import logs
from rota.model.ids import ShowId

REST: Final = 4.0
"""As `rota.accounting.maintenance` has it."""
GRACE_S: Final = 1.0
"""Shorter than there: nobody dies here, and the pause before the burial is not counted."""


class Told(msgspec.Struct, frozen=True):
    postgres_url: str
    redis_url: str
    show: ShowId


class Recompute(msgspec.Struct, frozen=True):
    """When it was at work: scanning, and then, after the grace, burying and rewriting the five tables."""

    spans: tuple[tuple[float, float], ...]
    chunks: int
    tokens: int

    @property
    def scan_s(self) -> float:
        began, ended = self.spans[0]
        return ended - began


class Scan:
    """The turn of a recount: held while it scans."""

    began = ended = 0.0

    async def __aenter__(self) -> Self:
        self.began = time.monotonic()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.ended = time.monotonic()


async def recompute(servers: Servers, show: ShowId) -> Recompute:
    scan = Scan()
    found = await reconcile.reconcile_show(servers.live, show, grace_s=GRACE_S, rest=REST, scan_slot=scan)
    assert found, "nobody else recounts here"
    waited = time.monotonic() - scan.ended >= GRACE_S
    await servers.transactional.refresh_managed_tables(show)
    rest = (scan.ended + GRACE_S * waited, time.monotonic())
    return Recompute(((scan.began, scan.ended), rest), found.chunks, found.tokens)


async def main() -> None:
    told = msgspec.json.decode(sys.stdin.readline(), type=Told)
    async with opened(told.postgres_url, told.redis_url) as servers:
        while await asyncio.to_thread(sys.stdin.readline):
            done = await recompute(servers, told.show)
            print(msgspec.json.encode(done).decode(), flush=True)


if __name__ == "__main__":
    logs.configure("console", "warning")
    asyncio.run(main())
