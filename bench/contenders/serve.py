"""What every contender's process does: answer requests on standard input, one line of JSON each.

    {"do": "prepare", "url": …}           make the schema, once, in a database that is then copied for every round
    {"do": "fill", "url": …, "n": …}      queue n entries; the answer says how many seconds that took
    {"do": "drain", "url": …, "n": …}     work off n no-op entries; the same

A peer that runs jobs has these in place of `drain`, because its workers are processes of their own, and entries of a
kind (see `bodies`), numbered from `first`:

    {"do": "start", "url": …, "kind": …, "processes": …, "each": …, "marks": …}
                                          start its workers; entries that ran are marked in that file
    {"do": "ended"}                       how many workers have exited
    {"do": "left", "url": …}              how many entries are not recorded as done
    {"do": "stop"}                        stop the workers

It runs in the virtualenv of the peers too, so it needs the standard library alone; uvloop is used where there is one.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from bench.contenders.workers import WorkerProcesses, kind_of_worker, url_of_worker

DRAIN_TIMEOUT_S = 120.0
FILL = 1000
PRODUCERS = 4

Body = dict[str, Any]


class Contender(Protocol):
    """Times are in seconds, and leave out connecting and making what is to be queued."""

    async def prepare(self, url: str) -> None: ...

    async def fill(self, url: str, bodies: list[Body]) -> float: ...

    async def drain(self, url: str, n: int) -> float: ...


class Peer(Protocol):
    """A contender with workers of its own."""

    async def prepare(self, url: str) -> None: ...

    async def fill(self, url: str, kind: str, bodies: list[Body]) -> float: ...

    def commands(self, kind: str, processes: int, each: int) -> list[list[str]]:
        """`python -m …` of its workers: in so many processes, each of which runs so many bodies at once."""
        ...

    async def left(self, url: str) -> int: ...


class LoopPeer(Peer, Protocol):
    """A peer whose worker is an event loop in a process of this module: `python -m module work EACH`."""

    async def work(self, url: str, kind: str, each: int, stopped: asyncio.Event) -> None: ...


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


def fill_one_by_one_s(bodies: list[Body], put: Callable[..., object]) -> float:
    """For peers that have nothing for many."""
    began = time.perf_counter()
    for each in bodies:
        put(**each)
    return time.perf_counter() - began


def serve(contender: Contender) -> None:
    run = _runner()
    for asked in _requests():
        url, n = asked["url"], asked["n"]
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
        _answer(seconds)


def serve_peer(peer: Peer) -> None:
    run, workers = _runner(), WorkerProcesses((), "", "", "")
    try:
        for asked in _requests():
            url, n, kind = asked["url"], asked["n"], asked.get("kind", "async")
            answer = 0.0
            match asked["do"]:
                case "prepare":
                    run(peer.prepare(url))
                case "fill":
                    bodies = [body(number) for number in range(asked["first"], asked["first"] + n)]
                    answer = run(peer.fill(url, kind, bodies))
                case "start":
                    commands = peer.commands(kind, asked["processes"], asked["each"])
                    workers = WorkerProcesses(commands, url, kind, asked["marks"])
                case "ended":
                    answer = workers.ended()
                case "left":
                    answer = run(peer.left(url))
                case "stop":
                    workers.stop()
                case other:
                    raise AssertionError(f"no peer can {other}")
            _answer(answer)
    finally:
        workers.stop()


def serve_loop_peer(peer: LoopPeer) -> None:
    """Answer requests, or be a worker."""
    if sys.argv[1:2] == ["work"]:
        _runner()(_work(peer, int(sys.argv[2])))
    else:
        serve_peer(peer)


def work_commands(module: str, processes: int, each: int) -> list[list[str]]:
    return [[module, "work", str(each)] for _ in range(processes)]


async def _work(peer: LoopPeer, each: int) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await peer.work(url_of_worker(), kind_of_worker(), each, stopped)


def _requests() -> Any:
    for line in sys.stdin:
        yield json.loads(line)


def _answer(number: float) -> None:
    print(json.dumps({"answer": number}), flush=True)


def _runner() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    try:
        run: Callable[[Coroutine[Any, Any, Any]], Any] = importlib.import_module("uvloop").run
    except ImportError:
        return asyncio.run
    return run
