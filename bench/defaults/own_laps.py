"""Laps of `rota up`: whole jobs, submitted by the SDK and worked off meanwhile, from the first call to the last end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from bench.contenders.bodies import COMMAND
from bench.contenders.serve import FILL, PRODUCERS, body
from bench.defaults.up import Instance, cores_of, for_slots, machine_cores, up
from bench.e2e.deployment import Lap
from rota.model.jobs.submission import LayerSpec, Submission
from rota.sdk.app import DEFAULT_SHOW
from rota.sdk.task import Task

WARM: Final = 200
"""Jobs before the first rate is measured: connections and plans are made, and processes started."""
SHORT_SHARE: Final = 0.2
"""Of a lap: how long the one before it takes, from which its size is taken. Series grow meanwhile."""
COMMANDS_AT_ONCE: Final = 32


@dataclass(frozen=True, slots=True)
class OwnLaps:
    """Of one kind of jobs on one instance, which is warm."""

    instance: Instance
    kind: str
    slots: int

    async def lap(self, n: int) -> Lap:
        put = self._commands if self.kind == "command" else self._tasks
        return await self.instance.farm.lap(n, lambda: put(n))

    async def measured(self, seconds: float) -> Lap:
        """A lap of about so many seconds: as many jobs as a shorter lap had at its rate."""
        short = await self.lap(WARM)
        short = await self.lap(max(WARM, round(short.per_s * seconds * SHORT_SHARE)))
        return await self.lap(max(WARM, round(short.per_s * seconds)))

    @property
    def _cores(self) -> float:
        return cores_of(self.kind, self.slots, machine_cores())

    async def _tasks(self, n: int) -> list[UUID]:
        """Several producers, as for peers that enqueue in bulk."""
        declared = self.instance.tasks
        task: Task[..., None] = declared.run_async if self.kind == "async" else declared.run_sync
        if self._cores != cores_of(self.kind, 1, 1):
            task = task.options(cores=self._cores)
        batches = iter([range(first, min(first + FILL, n)) for first in range(0, n, FILL)])

        async def produce() -> list[UUID]:
            last: list[UUID] = []
            for batch in batches:
                jobs = await task.submit_many([task.call(**body(number)) for number in batch])
                last = [job.id for job in jobs[-10:]]
            return last

        return _joined(await asyncio.gather(*(produce() for _ in range(PRODUCERS))))

    async def _commands(self, n: int) -> list[UUID]:
        """One by one, many at once: the SDK has nothing for many commands."""
        layer = LayerSpec(argv=COMMAND, cores=self._cores)
        submission, numbers = Submission(show=DEFAULT_SHOW, layers=(layer,)), iter(range(n))

        async def produce() -> list[UUID]:
            last: list[UUID] = []
            for _ in numbers:
                last = [(await self.instance.tasks.app.submit(submission)).id]
            return last

        return _joined(await asyncio.gather(*(produce() for _ in range(COMMANDS_AT_ONCE))))


def _joined(lists: Sequence[list[UUID]]) -> list[UUID]:
    return [job for last in lists for job in last]


@asynccontextmanager
async def warm(kind: str, slots: int) -> AsyncIterator[OwnLaps]:
    """A new `rota up`, which is checked when its laps are over."""
    async with up(for_slots(slots)) as instance:
        laps = OwnLaps(instance, kind, slots)
        await laps.lap(WARM)
        yield laps
        await instance.farm.check()
