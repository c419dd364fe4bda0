"""A contender's process, as the benchmark sees it: requests and answers (see `bench.contenders.serve`)."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import IO, Final

from bench import peers

ANSWER_TIMEOUT_S: Final = 180.0
END_TIMEOUT_S: Final = 25.0
"""A peer stops its workers first."""


class Stopped(Exception):
    """A contender's process ended or stayed silent; says what it wrote last."""


class Contender:
    """One contender's process. Its URL holds a password, so it is told on standard input."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, said: IO[bytes]) -> None:
        self._name = name
        self._process = process
        self._said = said

    async def ask(self, do: str, url: str = "", n: int = 0, **more: object) -> float:
        """The number it answers. Anything on its output that is no answer was printed by a library."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps({"do": do, "url": url, "n": n, **more}).encode() + b"\n")
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                async for line in self._process.stdout:
                    if line.startswith(b'{"answer"'):
                        return float(json.loads(line)["answer"])
        except TimeoutError:
            raise self.stopped(f"did not {do} within {ANSWER_TIMEOUT_S:.0f} s") from None
        raise self.stopped(f"failed to {do}")

    def stopped(self, what: str) -> Stopped:
        return Stopped(f"{self._name} {what}: {self._last_words()}")

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
