"""What a worker offers: said in its Hello and in every heartbeat. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

import msgspec

from rota.model.messages import Heartbeat, Hello, Run
from rota.model.work import TASK_CAPABILITY


class Load(msgspec.Struct, frozen=True):
    """How busy the machine is, each in percent."""

    cpu: float = 0.0
    memory: float = 0.0
    gpu: float = 0.0


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    pool: str
    slots: int
    cores: int
    """Hundredths of a core."""
    gpus: int = 0
    memory_mb: int = 0
    """0: not known, and not counted."""
    labels: dict[str, str] = {}
    capabilities: tuple[str, ...] = ()

    def hello(self, tasks: tuple[str, ...], version: str) -> Hello:
        return Hello(
            name=self.name,
            pool=self.pool,
            slots=self.slots,
            cores=self.cores,
            gpus=self.gpus,
            memory_mb=self.memory_mb,
            labels=self.labels,
            capabilities=self.capabilities,
            tasks=tasks,
            version=version,
        )

    def knowing(self, tasks: Iterable[str]) -> Offer:
        """The same, saying which tasks it can run: frames are placed where their task is known."""
        known = (f"{TASK_CAPABILITY}{name}" for name in sorted(tasks))
        return msgspec.structs.replace(self, capabilities=(*self.capabilities, *known))

    def heartbeat(
        self, worker: UUID, number: int, *, load: Load, draining: bool, held: list[Run], reported: int
    ) -> Heartbeat:
        return Heartbeat(
            worker=worker,
            name=self.name,
            pool=self.pool,
            number=number,
            slots=self.slots,
            cores=self.cores,
            gpus=self.gpus,
            memory_mb=self.memory_mb,
            cpu_load=load.cpu,
            gpu_utilization=load.gpu,
            memory_load=load.memory,
            labels=self.labels,
            capabilities=self.capabilities,
            draining=draining,
            held=held,
            reported=reported,
        )
