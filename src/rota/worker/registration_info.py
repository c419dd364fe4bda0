"""Resources a worker advertises in its registration and in every heartbeat. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

import msgspec

from rota.model.jobs.work import TASK_CAPABILITY_PREFIX
from rota.model.protocol import Heartbeat, Register
from rota.model.token_ranges import TokenRange


class HostLoad(msgspec.Struct, frozen=True):
    """Load of the host, in percent."""

    cpu: float = 0.0
    memory: float = 0.0
    gpu: float = 0.0


class RegistrationInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    pool: str
    slots: int
    cores: int
    """Hundredths of a core."""
    gpus: int = 0
    memory_mb: int = 0
    """0: unknown, not limited."""
    labels: dict[str, str] = {}
    capabilities: tuple[str, ...] = ()

    def registration_message(self, tasks: tuple[str, ...], version: str) -> Register:
        return Register(
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

    def with_tasks(self, tasks: Iterable[str]) -> RegistrationInfo:
        """A copy with one capability per task, so that frames are placed on workers that have their task."""
        known = (f"{TASK_CAPABILITY_PREFIX}{name}" for name in sorted(tasks))
        return msgspec.structs.replace(self, capabilities=(*self.capabilities, *known))

    def heartbeat(
        self,
        worker: UUID,
        number: int,
        *,
        interval_s: float,
        load: HostLoad,
        draining: bool,
        held: list[TokenRange],
        reported: int,
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
            interval_s=interval_s,
            held=held,
            reported=reported,
            series=True,
        )
