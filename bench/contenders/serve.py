"""What every contender's process does: answer requests on standard input, one line of JSON each.

    {"do": "prepare", "url": …}           make the schema, once, in a database that is then copied for every round
    {"do": "fill", "url": …, "n": …}      queue n entries in bulk; the answer says how many seconds that took
    {"do": "drain", "url": …, "n": …}     work off n no-op entries; the same

It runs in the virtualenv of the peers too, so it needs the standard library alone; uvloop is used where there is one.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

DRAIN_TIMEOUT_S = 120.0
FILL = 1000
PRODUCERS = 4

Body = dict[str, Any]


class Contender(Protocol):
    """Times are in seconds, and leave out connecting and making what is to be queued."""

    async def prepare(self, url: str) -> None: ...

    async def fill(self, url: str, bodies: list[Body]) -> float: ...

    async def drain(self, url: str, n: int) -> float: ...


class Countdown:
    """Tells when the first and the last of n entries ran, and that each ran once."""

    def __init__(self, n: int) -> None:
        self.left = n
        self._first = self._last = 0.0
        self._done = asyncio.Event()

    def tick(self) -> None:
        if not self._first:
            self._first = time.perf_counter()
        self.left -= 1
        if self.left == 0:
            self._last = time.perf_counter()
            self._done.set()

    async def finished(self) -> None:
        """A peer that loses an entry must not hang the run."""
        await asyncio.wait_for(self._done.wait(), DRAIN_TIMEOUT_S)

    def took_s(self) -> float:
        assert self.left == 0, f"{-self.left} entries ran twice" if self.left < 0 else f"{self.left} never ran"
        return self._last - self._first


def body(number: int) -> Body:
    """What an entry carries: 70 to 80 bytes of JSON, different for each."""
    return {"frame": number, "scene": f"shots/sq{number % 97:03}/sh{number:07}/comp.v001.%04d.exr"}


async def fill_s(bodies: list[Body], put: Callable[[list[Body]], Awaitable[object]]) -> float:
    """Several producers put in a batch each until nothing is left."""
    batches = iter([bodies[first : first + FILL] for first in range(0, len(bodies), FILL)])

    async def produce() -> None:
        for batch in batches:
            await put(batch)

    began = time.perf_counter()
    await asyncio.gather(*(produce() for _ in range(PRODUCERS)))
    return time.perf_counter() - began


def serve(contender: Contender) -> None:
    run = _runner()
    for line in sys.stdin:
        asked = json.loads(line)
        url, n = asked["url"], asked.get("n", 0)
        match asked["do"]:
            case "prepare":
                run(contender.prepare(url))
                seconds = 0.0
            case "fill":
                seconds = run(contender.fill(url, [body(number) for number in range(n)]))
            case "drain":
                seconds = run(contender.drain(url, n))
            case other:
                raise AssertionError(f"no contender can {other}")
        print(json.dumps({"seconds": seconds}), flush=True)


def _runner() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    try:
        run: Callable[[Coroutine[Any, Any, Any]], Any] = importlib.import_module("uvloop").run
    except ImportError:
        return asyncio.run
    return run
