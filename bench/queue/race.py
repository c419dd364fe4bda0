"""Rota's queue and its peers in turn, each in a process of its own on a fresh copy of its own database.

The clock of a peer stops with its last entry's body, whatever it has left to write; Rota's when all ends are committed.
Slower contenders get fewer entries. That is to their advantage: a short backlog is the easier one.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import IO, Final

from bench import peers
from bench.report import Figure
from bench.server import Server

ANSWER_TIMEOUT_S: Final = 180.0
END_TIMEOUT_S: Final = 10.0
SETTINGS: Final = {
    "rota": "batches of 256, 4 in flight; 4 shards",
    "pgqueuer": "batch_size 1024, pooled asyncpg, uvloop, logged tables",
    "awa": "enqueue_many_copy; 256 workers, claim_batch_size 256, 1 claimer, uvloop",
    "procrastinate": "concurrency 50, psycopg binary, uvloop, delete_jobs always",
}
BARS: Final = {"pgqueuer": 4.0, "awa": 8.0, "procrastinate": 50.0}
ENQUEUE_BAR: Final = 2.0
WAL_BAR: Final = 600.0


class Stopped(Exception):
    """A contender's process ended or stayed silent; says what it wrote last."""


@dataclass(slots=True)
class Lap:
    fill_per_s: float
    drain_per_s: float
    wal_bytes: float


@dataclass(slots=True)
class Race:
    """Laps by contender, a round each; who is absent, and why."""

    laps: dict[str, list[Lap]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def figures(self) -> Iterator[Figure]:
        for name, bar in BARS.items():
            yield self._against(name, "drain", bar, "no-op entries a second, one Python process each")
        yield self._against(
            "awa", "enqueue", ENQUEUE_BAR, "4 producers, 1,000 entries a commit, 75 bytes of payload each"
        )
        wal = [lap.wal_bytes for lap in self.laps["rota"]]
        yield Figure("wal_bytes_per_frame", wal, bar=WAL_BAR, note="enqueue, claim and complete; an entry per frame")
        for name, settings in SETTINGS.items():
            if name in self.absent:
                yield Figure(f"{name}_drain_per_s", [], note=f"not measured: {self.absent[name]}")
                continue
            laps, version = self.laps[name], "" if name == "rota" else f"{peers.version(name)}: "
            yield Figure(f"{name}_drain_per_s", [lap.drain_per_s for lap in laps], note=f"{version}{settings}")
            yield Figure(f"{name}_enqueue_per_s", [lap.fill_per_s for lap in laps])
            yield Figure(f"{name}_wal_bytes", [lap.wal_bytes for lap in laps], note="per entry, from enqueue to end")

    def _against(self, peer: str, what: str, bar: float, note: str) -> Figure:
        if peer in self.absent:
            return Figure(f"{what}_vs_{peer}", [], bar=bar, note=f"not measured: {self.absent[peer]}")
        ratios = [
            ours.drain_per_s / theirs.drain_per_s if what == "drain" else ours.fill_per_s / theirs.fill_per_s
            for ours, theirs in zip(self.laps["rota"], self.laps[peer], strict=True)
        ]
        return Figure(f"{what}_vs_{peer}", ratios, bar=bar, higher_is_better=True, note=note)


class Contender:
    """One contender's process. Its URL holds a password, so it is told on standard input."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, said: IO[bytes]) -> None:
        self._name = name
        self._process = process
        self._said = said

    async def ask(self, do: str, url: str, n: int = 0) -> float:
        """Seconds that it took. Anything on its output that is no answer was printed by a library."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps({"do": do, "url": url, "n": n}).encode() + b"\n")
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                async for line in self._process.stdout:
                    if line.startswith(b'{"seconds"'):
                        return float(json.loads(line)["seconds"])
        except TimeoutError:
            raise Stopped(f"{self._name} did not {do} within {ANSWER_TIMEOUT_S:.0f} s") from None
        raise Stopped(f"{self._name} failed to {do}: {self._last_words()}")

    async def end(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), END_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


@asynccontextmanager
async def started(name: str) -> AsyncIterator[Contender]:
    python = sys.executable if name.startswith("rota") else str(peers.python())
    path = os.pathsep.join(filter(None, (str(peers.ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryFile() as said:
        process = await asyncio.create_subprocess_exec(
            *(python, "-m", f"bench.contenders.{name}"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=said,
            env=os.environ | {"PYTHONPATH": path},
        )
        contender = Contender(name, process, said)
        try:
            yield contender
        finally:
            await contender.end()


def made(name: str) -> str:
    """The database with a contender's schema and nothing in it."""
    return f"made_{name}"


async def race(server: Server, rounds: int, entries: dict[str, int]) -> Race:
    found = Race()
    for name in SETTINGS:
        missing = None if name == "rota" else peers.absence(name)
        if missing or (missing := await _prepare(server, name)):
            found.absent[name] = missing
            print(f"{name} takes no part: {missing}")
    for _ in range(rounds):
        for name in [name for name in SETTINGS if name not in found.absent]:
            try:
                found.laps.setdefault(name, []).append(await _lap(server, name, entries[name]))
            except Stopped as stopped:
                if name == "rota":
                    raise
                found.absent[name] = str(stopped)
                print(f"{name} takes no further part: {stopped}")
    return found


async def _prepare(server: Server, name: str) -> str | None:
    """Why it cannot take part, or None."""
    try:
        async with started(name) as contender:
            await contender.ask("prepare", await server.create(made(name)))
    except Stopped as stopped:
        if name == "rota":
            raise
        return str(stopped)
    return None


async def _lap(server: Server, name: str, n: int) -> Lap:
    url = await server.create("lap", template=made(name))
    try:
        async with started(name) as contender:
            await server.checkpoint()
            before = await server.wal_bytes()
            fill_s = await contender.ask("fill", url, n)
            filled = await server.wal_bytes()
            await server.checkpoint()
            rested = await server.wal_bytes()
            drain_s = await contender.ask("drain", url, n)
            drained = await server.wal_bytes()
    finally:
        await server.drop("lap")
    return Lap(n / fill_s, n / drain_s, (filled - before + drained - rested) / n)
